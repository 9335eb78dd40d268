"""The translation of a config file: entries in current keys, and notes on what was translated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from overland.config.errors import Problem
from overland.config.source import Entries, Entry, KeyPath, Translated


def is_one_of(value: Any, harmless: Iterable[Any]) -> bool:
    """Returns whether a value is in a list, type included: to Python, 1 equals true."""
    return any(type(value) is type(one) and value == one for one in harmless)


class Draft:
    """Collects translated entries. Entries that the file has in current keys are never
    overwritten."""

    def __init__(self, native: Entries, shown: str) -> None:
        self.entries = dict(native)
        self.notes: list[str] = []
        self.routine: set[str] = set()
        self.problems: list[Problem] = []
        self._native = frozenset(native)
        self._shown = shown
        self._reasons: dict[str, list[str]] = {}

    def put(self, path: KeyPath, value: Any, source: Entry) -> bool:
        """Sets a key from an older one; False if the file also has the current key, which wins."""
        if path in self._native:
            return False
        self.entries[path] = Entry(value, source.where, source.section_where)
        return True

    def rename(self, old: KeyPath, new: KeyPath, value: Any, source: Entry) -> None:
        if self.put(new, value, source):
            if old != new:
                self.became(source, f"{'.'.join(old)} is now {'.'.join(new)}")
        else:
            self.became(source, f"{'.'.join(old)} is ignored, since {'.'.join(new)} is also set")

    def note(self, source: Entry, text: str) -> None:
        self.notes.append(f"{source.where}: {text}")

    def became(self, source: Entry, text: str) -> None:
        """Notes what became of a key. Unlike other notes, it is not printed at every start."""
        self.note(source, text)
        self.routine.add(self.notes[-1])

    def refuse(self, path: KeyPath, source: Entry, reason: str) -> None:
        """Reports a key that would train something other than was asked for, where a note is not
        enough."""
        self.problems.append(Problem(reason, source.where, ".".join(path), source.value))

    def expect_bool(self, path: KeyPath, source: Entry) -> bool:
        """Returns whether a value is true or false, and refuses any other: any text, also "false",
        would count as true."""
        if not isinstance(source.value, bool):
            self.refuse(path, source, "expected true or false")
        return isinstance(source.value, bool)

    def without_meaning(self, path: KeyPath, source: Entry, reason: str) -> None:
        """Notes a key that has no effect; keys with the same reason share a note."""
        line = source.where.rpartition(":")[2] if ":" in source.where else ""
        shown = ".".join(path) + (f" (line {line})" if line.isdecimal() else "")
        self._reasons.setdefault(reason, []).append(shown)

    def finish(self, about: str = "") -> Translated:
        grouped = [
            f"{self._shown}: ignored: {', '.join(keys)}: {reason}"
            for reason, keys in self._reasons.items()
        ]
        routine = frozenset({*self.routine, *grouped})
        return Translated(self.entries, self.notes + grouped, self.problems, routine, about)
