"""Which column holds the documents.

A column is named by its path: `text`, `meta.text` (a field of an object), `files[].text` (of every
object in a list; each is a document of its own). Where none is asked for, one of the usual names is
taken, or the only column there is; otherwise the columns are listed, with an example of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from overland.data.sources.source import Kind
from overland.errors import DataError, Unsettled
from overland.words import any_of, nearest_name

# Where a corpus has several columns and none is asked for, the first of these that it has.
USUAL_NAMES = ("text", "tokens", "input_ids", "content")
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


@dataclass(frozen=True)
class Column:
    type: str
    place: Place
    kind: Kind | None = None
    """What its documents are; None: it holds none."""


def name_of(place: Place) -> str:
    """`files[].text` of ("files", None, "text")."""
    return "".join("[]" if step is None else f".{step}" for step in place).removeprefix(".")


def choose_column(
    where: object,
    wanted: str | None,
    columns: Mapping[str, Column],
    examples: Callable[[], Mapping[str, Any]] = dict,
) -> str:
    """The wanted column, or the one that must be meant. `examples`: a value of each, by name."""
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
    near = did_you_mean(name, columns)
    its = f"{near} Its" if near else "; its"
    return DataError(f"{where} has no column {name!r}{its} columns: {listed}")


def did_you_mean(name: str, known: Mapping[str, object]) -> str:
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
    """What to say of conversations and of pairs of a question and an answer."""
    tops = {column.place[0] for column in columns.values()}
    found = [name for name in TURNS if name in tops] or next(
        (list(pair) for pair in PAIRS if tops.issuperset(pair)), []
    )
    if not found:
        return ""
    return (
        f". This looks like chat data for fine-tuning ({any_of(found, 'and')}), which is not "
        "supported yet; to pretrain on it, write each conversation as one text column"
    )
