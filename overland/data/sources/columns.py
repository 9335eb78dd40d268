"""Which column holds the documents, and what lies at its place in a record.

A column is named by its path: `text`, `meta.text` (a field of an object), `files[].text` (of every
object in a list; each is a document of its own). Where none is asked for, one of the usual names is
taken, or the only column there is; otherwise the columns are listed, with an example of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from overland.data.sources.source import Kind
from overland.errors import DataError, Unsettled
from overland.words import any_of, nearest_name

# Where a corpus has several columns and none is asked for, the first of these that it has.
USUAL_NAMES = ("text", "tokens", "input_ids", "content")
WHOLE = "*"  # asked for as a column, it makes a document of each record
LISTED = 24  # columns that a message shows at most
EXAMPLE_CHARACTERS = 32
# What conversations and pairs for fine-tuning are called in public datasets.
TURNS = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns")
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("chosen", "rejected"),
)
Step: TypeAlias = str | None
"""Into a record: the field of that name, or (None) every item of a list."""
Place: TypeAlias = tuple[Step, ...]
MAX_COLUMNS = 256  # an object whose keys are data has any number
MAX_DEPTH = 6
ITEMS = 4  # of a list, that are looked at
TYPE_NAMES: dict[Kind, str] = {"text": "string", "tokens": "list of int"}


@dataclass(frozen=True)
class Column:
    type: str
    place: Place
    kind: Kind | None = None
    """What its documents are; None: it holds none."""


RECORD = Column("record", (), "records")


def column_name(place: Place) -> str:
    """Returns `files[].text` for ("files", None, "text")."""
    return "".join("[]" if step is None else f".{step}" for step in place).removeprefix(".")


def choose_column(
    where: object,
    wanted: str | None,
    columns: Mapping[str, Column],
    examples: Callable[[], Mapping[str, Any]] = dict,
) -> str:
    """The wanted column, or the one that must be meant. `examples`: a value of each, by name."""
    if wanted == WHOLE:
        return WHOLE
    if wanted is not None:
        if wanted not in columns:
            raise no_column(where, wanted, columns, _listed(columns))
        if columns[wanted].kind is None:
            listed = _listed(columns, examples())
            raise DataError(
                f"{where}: column {wanted!r} holds no text or token ids; its columns: {listed}"
            )
        return wanted
    for name in USUAL_NAMES:
        if name in columns and columns[name].kind is not None:
            return name
    if len(columns) == 1 and next(iter(columns.values())).kind is not None:
        return next(iter(columns))
    raise Unsettled(
        f"{where}: set ",
        "column",
        f" to the column that holds the documents; its columns: {_listed(columns, examples())}"
        f"{_chat(columns)}",
    )


def no_column(where: object, name: str, columns: Mapping[str, object], listed: str) -> DataError:
    near = nearest_hint(name, columns)
    its = f"{near} Its" if near else "; its"
    return DataError(f"{where} has no column {name!r}{its} columns: {listed}")


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` where a name is near, or nothing."""
    near = nearest_name(name, known)
    return f"; did you mean {near!r}?" if near else ""


def _listed(columns: Mapping[str, Column], examples: Mapping[str, Any] | None = None) -> str:
    shown = []
    for name, column in list(columns.items())[:LISTED]:
        value = (examples or {}).get(name)
        example = "" if value is None else f", such as {_short(value)}"
        shown.append(f"{name} ({column.type}{example})")
    more = f" and {len(columns) - LISTED:,} more" if len(columns) > LISTED else ""
    return f"{', '.join(shown)}{more}"


def _short(value: Any) -> str:
    if isinstance(value, bytes):
        value = value[: 4 * EXAMPLE_CHARACTERS].decode("utf-8", "replace")
    if isinstance(value, str):
        rest = "…" if len(value) > EXAMPLE_CHARACTERS else ""
        return repr(value[:EXAMPLE_CHARACTERS]) + rest
    text = str(value[:16] if isinstance(value, list) else value)
    return text if len(text) <= EXAMPLE_CHARACTERS else text[: EXAMPLE_CHARACTERS - 1] + "…"


def _chat(columns: Mapping[str, Column]) -> str:
    """Returns what to say of conversations and of pairs of a question and an answer."""
    tops = {column.place[0] for column in columns.values()}
    found = [name for name in TURNS if name in tops] or next(
        (list(pair) for pair in PAIRS if tops.issuperset(pair)), []
    )
    if not found:
        return ""
    return (
        f'. This looks like data for fine-tuning ({any_of(found, "and")}): sft.shape = "auto" '
        "learns from conversations; to pretrain on it, write each as one text column"
    )


def values_at(record: object, place: Place) -> Iterator[object]:
    """Yields every value at a place; None where the record has nothing there."""
    if not place:
        yield record
        return
    step, rest = place[0], place[1:]
    if step is not None:
        yield from values_at(record.get(step) if isinstance(record, dict) else None, rest)
    elif isinstance(record, list):
        for item in record:
            yield from values_at(item, rest)
    else:
        yield None


def kind_of_value(value: object) -> Kind | None:
    if isinstance(value, str):
        return "text"
    is_ids = isinstance(value, list) and all(type(item) is int for item in value)
    return "tokens" if is_ids else None


class Sample:
    """The columns of some records, and what they hold."""

    def __init__(self) -> None:
        self.num_lines = self.num_bytes = 0
        self.examples: dict[str, Any] = {}
        self._types: dict[Place, str] = {}
        self._kinds: dict[Place, Counter[Kind]] = {}

    def add(self, record: object) -> None:
        if isinstance(record, dict):
            for name, value in record.items():
                self._add((name,), value)

    def columns(self, wanted: str | None) -> dict[str, Column]:
        """Returns columns by name. One that is asked for, or has the usual name of text, may be
        null in all of the sample: it is text then, and its nulls are bad documents."""
        found: dict[str, Column] = {}
        containers = {place[:end] for place in self._types for end in range(1, len(place))}
        for place, type in self._types.items():
            name, kinds = column_name(place), self._kinds[place]
            if place in containers and not kinds.total():  # null or empty only in some records
                continue
            kind = kinds.most_common(1)[0][0] if kinds else None
            if kind is not None and kinds[kind]:
                type = TYPE_NAMES[kind]
            elif type == "null" and name in (wanted, "text"):
                kind = "text"
            # One whose own name is `a.b` comes before the field b of a.
            if name not in found or len(place) < len(found[name].place):
                found[name] = Column(type, place, kind)
        return found

    def _add(self, place: Place, value: object) -> None:
        if len(place) < MAX_DEPTH and isinstance(value, dict) and value:
            for name, item in value.items():
                self._add((*place, str(name)), item)
            return
        if len(place) < MAX_DEPTH and isinstance(value, list) and kind_of_value(value) is None:
            for item in value[:ITEMS]:
                self._add((*place, None), item)
            return
        if place not in self._types:
            if len(self._types) >= MAX_COLUMNS:
                return
            self._types[place], self._kinds[place] = "null", Counter()
        if self._types[place] == "null":
            self._types[place] = _type_of(value)
        if value is not None:
            self.examples.setdefault(column_name(place), value)
        kind = kind_of_value(value)
        # An empty list may be one of anything; it settles nothing where there is more to see.
        if kind is not None:
            self._kinds[place][kind] += 1 if value or kind == "text" else 0


def _type_of(value: object) -> str:
    names = {str: "string", bool: "bool", int: "int", float: "float", type(None): "null"}
    if isinstance(value, list):
        return "list of int" if value and kind_of_value(value) else "list"
    return names.get(type(value), "object")
