"""What every dialect writes into: entries in current keys, and how notes on renamed and ignored
keys and refusals are worded and grouped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from overland.config.errors import Problem, show_value
from overland.config.source import Entries, Entry, KeyPath, Translated
from overland.words import any_of

SAME = "Overland already works this way"


def is_one_of(value: Any, harmless: Iterable[Any]) -> bool:
    """Returns whether a value is in a list, type included: to Python, 1 equals true."""
    return any(type(value) is type(one) and value == one for one in harmless)


def is_on(entry: Entry | None) -> TypeGuard[Entry]:
    """Returns whether a key is set to true, or to anything that is not empty."""
    return entry is not None and bool(entry.value)


def path_of(key: str) -> KeyPath:
    return tuple(key.split("."))


def by_key(names_of: Mapping[str, str]) -> dict[str, str]:
    """Returns the reason for each key, from the names of keys, separated by spaces, by reason."""
    return {key: reason for reason, names in names_of.items() for key in names.split()}


def reason_for(path: KeyPath, reasons: Mapping[str, str]) -> str:
    """Returns the reason for a key, or for the innermost table that it is in; empty without one."""
    names = (".".join(path[:n]) for n in range(len(path), 0, -1))
    return next((reasons[name] for name in names if name in reasons), "")


class Draft:
    """Collects translated entries. Entries that the file has in current keys are never
    overwritten; `above` will override them all, untranslated."""

    def __init__(self, native: Entries, shown: str, above: Entries | None = None) -> None:
        self.entries = dict(native)
        self.above = above or {}
        self.first = Entry(None, shown)
        """The place that is given for defaults."""
        self.notes: list[str] = []
        self.routine: set[str] = set()
        self.problems: list[Problem] = []
        self._native = frozenset(native)
        self._reasons: dict[str, list[str]] = {}

    def put(self, today: str | KeyPath, value: Any, source: Entry) -> bool:
        """Sets a key from an older one; False if the file also has the current key, which wins."""
        path = path_of(today) if isinstance(today, str) else today
        if path in self._native:
            return False
        self.entries[path] = Entry(value, source.where, source.section_where)
        return True

    def move(self, old: str, today: str, value: Any, source: Entry) -> None:
        """Sets a key from an older one, and notes that it did, or that the current one wins."""
        if not self.put(today, value, source):
            self.became(source, f"{old} is ignored, since {today} is also set")
        elif old != today:
            self.became(source, f"{old} is now {today}")

    def change(
        self, old: str, source: Entry, today: Mapping[str, Any], otherwise: str = SAME
    ) -> None:
        """Sets what an older key became with the value that it has. If that is nothing, it has no
        effect, and `otherwise` says why."""
        said = [f"{key} = {show_value(value)}" for key, value in today.items()
                if self.put(key, value, source)]  # fmt: skip
        if not today:
            self.without_meaning(old, source, otherwise)
        elif said:
            shown = f"{old} = {show_value(source.value)}"
            self.became(source, f"{shown} is now {any_of(said, 'and')}")
        else:
            self.became(source, f"{old} is ignored, since {any_of([*today], 'and')} is also set")

    def decided(self, today: str) -> bool:
        """Returns whether the file or the command line sets a current key, or a part of it."""
        path = path_of(today)
        return any(one[: len(path)] == path for one in (*self.above, *self.entries))

    def set_to(self, today: str) -> Any:
        """Returns the value of a current key, if it has one."""
        entry = self.above.get(path_of(today)) or self.entries.get(path_of(today))
        return None if entry is None else entry.value

    def note(self, source: Entry | None, text: str) -> None:
        self.notes.append(f"{(source or self.first).where}: {text}")

    def became(self, source: Entry, text: str) -> None:
        """Notes what became of a key. Unlike other notes, it is not printed at every start."""
        self.note(source, text)
        self.routine.add(self.notes[-1])

    def refuse(self, key: str, source: Entry | None, reason: str) -> None:
        """Reports a key that would train something other than was asked for, where a note is not
        enough."""
        source = source or self.first
        self.problems.append(Problem(reason, source.where, key, source.value))

    def expect_bool(self, key: str, source: Entry) -> bool:
        """Returns whether a value is true or false, and refuses any other: any text, also "false",
        would count as true."""
        if not isinstance(source.value, bool):
            self.refuse(key, source, "expected true or false")
        return isinstance(source.value, bool)

    def without_meaning(self, key: str, source: Entry | None, reason: str) -> None:
        """Notes that a key, if it is set, has no effect; keys with the same reason share a note."""
        if source is None:
            return
        line = source.where.rpartition(":")[2] if ":" in source.where else ""
        shown = key + (f" (line {line})" if line.isdecimal() else "")
        self._reasons.setdefault(reason, []).append(shown)

    def expect(
        self, key: str, source: Entry, harmless: Iterable[Any], reason: str, same: str = SAME
    ) -> None:
        """Refuses a key with the reason, unless its value is harmless: that of what happens
        anyway."""
        if is_one_of(source.value, harmless):
            self.without_meaning(key, source, same)
        else:
            self.refuse(key, source, reason)

    def finish(self, about: str = "") -> Translated:
        grouped = [
            f"{self.first.where}: ignored: {', '.join(keys)}: {reason}"
            for reason, keys in self._reasons.items()
        ]
        routine = frozenset({*self.routine, *grouped})
        return Translated(self.entries, self.notes + grouped, self.problems, routine, about)
