"""Which column holds the documents."""

from __future__ import annotations

from collections.abc import Mapping

from overland.config.errors import nearest_name
from overland.data.errors import DataError
from overland.data.sources.source import Kind

# Where a corpus has several columns and none is asked for, the first of these that it has.
USUAL_NAMES = ("text", "tokens", "input_ids", "content")


def choose_column(
    where: object, wanted: str | None, types: Mapping[str, str], kinds: Mapping[str, Kind]
) -> str:
    """The wanted column, or the one that must be meant. `types`: all; `kinds`: those that hold
    documents."""
    has = "its columns: " + ", ".join(f"{name} ({type})" for name, type in types.items())
    if wanted is not None:
        if wanted not in types:
            raise DataError(f"{where} has no column {wanted!r}{did_you_mean(wanted, types)}; {has}")
        if wanted not in kinds:
            raise DataError(f"{where}: column {wanted!r} holds no text or token ids; {has}")
        return wanted
    for name in USUAL_NAMES:
        if name in kinds:
            return name
    if len(kinds) == 1:
        return next(iter(kinds))
    raise DataError(f"{where}: say which column holds the documents (--column); {has}")


def did_you_mean(name: str, known: Mapping[str, object]) -> str:
    near = nearest_name(name, known)
    return f"; did you mean {near!r}?" if near else ""
