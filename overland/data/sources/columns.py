"""Which column holds the documents, and how its values are found in a record.

A column is named by its path: `text`, `meta.text` (a field of an object), `files[].text` (a field
of every object in a list, each of which is a document), `files[+].text` (the same, joined into one
document per record). If none is requested, a column with a usual name or the only column is used;
otherwise the error lists the columns, with an example of each.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from overland.data.sources.source import Document, FileSource, Kind, Located, token_ids
from overland.errors import ChoiceRequired, DataError
from overland.words import any_of, first_few, nearest_name

# If a corpus has several columns and none is requested, the first of these that it has is used.
USUAL_NAMES = ("text", "tokens", "input_ids", "content")
EACH, JOINED = "[]", "[+]"
WHOLE = "*"  # requested as a column, it makes each whole record a document
NO_ARRAY = "; expected one object per line, not an array"
LISTED = 24  # most columns that a message shows
EXAMPLE_CHARACTERS = 32
# What conversations, and questions with their answers, are called in public datasets.
TURNS = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns", "chat")
QUESTIONS = ("instruction", "prompt", "question", "query")
ANSWERS = ("output", "completion", "response", "answer")
PAIRS = [*itertools.product(QUESTIONS, ANSWERS), ("chosen", "rejected")]
Step: TypeAlias = str | None
"""A step into a record: the field of that name, or (None) every item of a list."""
Place: TypeAlias = tuple[Step, ...]
MAX_COLUMNS = 256  # an object whose keys are data can have any number
MAX_DEPTH = 6
ITEMS = 4  # of each list, inspected
TYPE_NAMES: dict[Kind, str] = {"text": "string", "tokens": "list of int"}


@dataclass(frozen=True)
class Column:
    type: str
    place: Place
    kind: Kind | None = None
    """What its documents are, or None if it holds no documents."""


RECORD = Column("record", (), "records")
KnownColumns: TypeAlias = Mapping[str, Column]
Examples: TypeAlias = Callable[[], Mapping[str, Any]]


def column_name(place: Place) -> str:
    """Returns `files[].text` for ("files", None, "text")."""
    return "".join(EACH if step is None else f".{step}" for step in place).removeprefix(".")


def joined(texts: Iterable[object]) -> str:
    """Joins the texts of a record, each after an empty line."""
    return "".join(f"\n\n{text}" for text in texts)


class ColumnFiles(FileSource):
    """Files of records, one value of which, or several, or all of it, is a document."""

    steps: Place = ("text",)
    """Where the documents are in a record."""
    joins = False
    """Whether the values of a record are joined into one document."""

    def choose(
        self, where: object, wanted: str | None, columns: KnownColumns, examples: Examples
    ) -> None:
        """Chooses the wanted column, or the only sensible one. Called again for a further file,
        checks that it has the same. `examples` has a value of each column."""
        if self.column is not None:
            self._check_same(where, columns)
            return
        self.columns = {name: one.type for name, one in columns.items()}
        self.column = _choose(where, wanted, columns, examples)
        chosen = RECORD if self.column == WHOLE else columns[self.column]
        self.kind, self.steps = chosen.kind or "text", chosen.place
        if wanted is not None and JOINED in wanted:
            if self.kind == "tokens":
                raise DataError(f"{where}: {wanted} has token ids, and only text can be joined")
            if EACH in wanted:
                raise DataError(
                    f"{where}: {wanted} joins one list, but not another: write {JOINED} twice"
                )
            self.column, self.joins = wanted, True

    def document(self, value: object, where: object, problem: Callable[[], str]) -> Document | None:
        """Returns a value of a record as a document, or None if it is bad. `problem` says what is
        wrong with a value of another kind."""
        if self.kind == "records" and isinstance(value, dict):
            return Located(value, where)
        is_ids = isinstance(value, np.ndarray) or kind_of_value(value) == "tokens"
        if self.kind == "tokens" and is_ids:
            return token_ids(value, where, self.bad)
        if self.kind != "text" or not isinstance(value, str):
            self.bad(f"{where}: {problem()}")
            return None
        try:
            value.encode()
        except UnicodeEncodeError:  # JSON can encode it
            name = column_name(self.steps)
            self.bad(f"{where}: {name} has half of a surrogate pair, so it is not UTF-8 text")
            return None
        return value

    def documents(self, record: object, where: object, text: str = "") -> list[Document]:
        """Returns the documents of a record, whose file has it as `text`."""
        problem, values = partial(self._problem, record, text), values_at(record, self.steps)
        documents = [self.document(value, where, problem) for value in values]
        found = [document for document in documents if document is not None]
        return [joined(found)] if self.joins and found else found

    def _problem(self, record: object, text: str) -> str:
        """Says what is wrong with a record that lacks a document."""
        hint = NO_ARRAY if isinstance(record, list) else ""
        if isinstance(record, dict) and self.steps and self.steps[0] not in record:
            hint = nearest_hint(str(self.steps[0]), record)
        what = f' with a "{column_name(self.steps)}"' if self.steps else ""
        what += " of token ids" if self.kind == "tokens" else ""
        return f"expected an object{what}, got {text.strip()[:60]!r}{hint}"

    def _check_same(self, file: object, columns: KnownColumns) -> None:
        name = column_name(self.steps)
        if self.column == WHOLE:
            if list(columns) != list(self.columns):
                raise DataError(f"{file} has different columns than {self.root / self.files[0]}")
        elif name not in columns:
            raise no_column(file, name, columns, ", ".join(columns))
        elif columns[name].kind != self.kind:
            type = columns[name].type
            raise DataError(f"{file}: column {name!r} is {type}, but {self.kind} in other files")


def _choose(where: object, wanted: str | None, columns: KnownColumns, examples: Examples) -> str:
    """Returns the name of the column: `files[].text` for `files[+].text` too."""
    if wanted == WHOLE:
        return WHOLE
    if wanted is not None:
        name = wanted.replace(JOINED, EACH)
        if name not in columns:
            raise no_column(where, wanted, columns, _listed(columns))
        if columns[name].kind is None:
            listed = _listed(columns, examples())
            raise DataError(
                f"{where}: column {wanted!r} contains no text or token ids; its columns: {listed}"
            )
        return name
    for name in USUAL_NAMES if len(columns) > 1 else columns:
        if name in columns and columns[name].kind is not None:
            return name
    raise ChoiceRequired(
        f"{where}: set ",
        "column",
        f" to the column that holds the documents; its columns: {_listed(columns, examples())}"
        f"{_chat(columns)}",
    )


class NoColumn(DataError):
    """Raised when a source lacks the column that was asked for."""


def no_column(where: object, name: str, columns: Mapping[str, object], listed: str) -> NoColumn:
    # Whoever joins would otherwise be led to a name that does not.
    known = [one.replace(EACH, JOINED) for one in columns] if JOINED in name else columns
    near = nearest_hint(name, known)
    its = f"{near} Its" if near else "; its"
    return NoColumn(f"{where} has no column {name!r}{its} columns: {listed}")


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` if there is a similar name, otherwise an empty string."""
    near = nearest_name(name, known)
    return f"; did you mean {near!r}?" if near else ""


def _listed(columns: KnownColumns, examples: Mapping[str, Any] | None = None) -> str:
    shown = []
    for name, column in columns.items():
        value = (examples or {}).get(name)
        example = "" if value is None else f", such as {_short(value)}"
        shown.append(f"{name} ({column.type}{example})")
    return first_few(shown, LISTED)


def _short(value: Any) -> str:
    if isinstance(value, bytes):
        value = value[: 4 * EXAMPLE_CHARACTERS].decode("utf-8", "replace")
    if isinstance(value, str):
        rest = "…" if len(value) > EXAMPLE_CHARACTERS else ""
        return repr(value[:EXAMPLE_CHARACTERS]) + rest
    text = str(value[:16] if isinstance(value, list) else value)
    return text if len(text) <= EXAMPLE_CHARACTERS else text[: EXAMPLE_CHARACTERS - 1] + "…"


def _chat(columns: KnownColumns) -> str:
    """Returns a hint if the columns look like conversations or question-answer pairs."""
    tops = {column.place[0] for column in columns.values()}
    found = [name for name in TURNS if name in tops] or next(
        (list(pair) for pair in PAIRS if tops.issuperset(pair)), []
    )
    if not found:
        return ""
    return (
        f'. This looks like fine-tuning data ({any_of(found, "and")}): set sft.shape = "auto" to '
        "train on conversations, or write each one as text in a single column to pretrain on it"
    )


def values_at(record: object, place: Place) -> Iterator[object]:
    """Yields every value at a place, and None if the record has nothing there."""
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


class ColumnSample:
    """The columns of some records, with their types and examples."""

    def __init__(self) -> None:
        self.examples: dict[str, Any] = {}
        self._types: dict[Place, str] = {}
        self._kinds: dict[Place, Counter[Kind]] = {}

    def add(self, record: object) -> None:
        if isinstance(record, dict):
            for name, value in record.items():
                self._add((name,), value)

    def columns(self, wanted: str | None) -> dict[str, Column]:
        """Returns columns by name. If the wanted column, or one called text, is null throughout the
        sample, it counts as text, and its nulls are bad documents."""
        wanted = (wanted or "text").replace(JOINED, EACH)
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
            # A column whose own name is `a.b` takes precedence over the field b of a.
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
        # An empty list could be of any type, so it does not count if other values show the type.
        if kind is not None:
            self._kinds[place][kind] += 1 if value or kind == "text" else 0


def _type_of(value: object) -> str:
    names = {str: "string", bool: "bool", int: "int", float: "float", type(None): "null"}
    if isinstance(value, list):
        return "list of int" if value and kind_of_value(value) else "list"
    return names.get(type(value), "object")
