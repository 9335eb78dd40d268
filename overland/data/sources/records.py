"""Records of nested values, as JSON has them: what lies at a place, and which places there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from overland.data.sources.columns import Column, Place, name_of
from overland.data.sources.source import Kind

MAX_COLUMNS = 256  # an object whose keys are data has any number
MAX_DEPTH = 6
ITEMS = 4  # of a list, that are looked at
TYPE_NAMES: dict[Kind, str] = {"text": "string", "tokens": "list of int"}


def values_at(record: object, place: Place) -> Iterator[object]:
    """Every value at a place; None where the record has nothing there."""
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


def kind_of(value: object) -> Kind | None:
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
        """By name. A column that is asked for, or has the usual name of text, may be null in all
        of the sample: it is text then, and its nulls are bad documents."""
        found: dict[str, Column] = {}
        containers = {place[:end] for place in self._types for end in range(1, len(place))}
        for place, type in self._types.items():
            name, kinds = name_of(place), self._kinds[place]
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
        if len(place) < MAX_DEPTH and isinstance(value, list) and kind_of(value) is None:
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
            self.examples.setdefault(name_of(place), value)
        kind = kind_of(value)
        # An empty list may be one of anything; it settles nothing where there is more to see.
        if kind is not None:
            self._kinds[place][kind] += 1 if value or kind == "text" else 0


def _type_of(value: object) -> str:
    names = {str: "string", bool: "bool", int: "int", float: "float", type(None): "null"}
    if isinstance(value, list):
        return "list of int" if value and kind_of(value) else "list"
    return names.get(type(value), "object")
