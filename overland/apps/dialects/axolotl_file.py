"""An axolotl file while it is being translated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overland.apps.dialects.axolotl_keys import SWITCHES
from overland.apps.dialects.draft import Draft
from overland.config.errors import Problem, show_value
from overland.config.fields import sections
from overland.config.source import Entries, Entry, Translated, nest
from overland.words import command

UNSET = "empty values have no effect"
SAME = "Overland already works this way"


@dataclass
class File:
    """The keys of a file that are still to be translated, and the results so far."""

    draft: Draft
    keys: dict[str, Entry]
    above: Entries
    first: Entry
    """The place that is given for defaults."""
    taken: dict[str, Entry] = field(default_factory=dict)
    renamed: list[str] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)
    lacking: list[Problem] = field(default_factory=list)

    @classmethod
    def of(cls, entries: Entries, shown: str, above: Entries) -> File:
        """Splits a file; sections in current keys may appear alongside axolotl's keys, and win."""
        own = {p: e for p, e in entries.items() if p[0] in sections() and len(p) > 1}
        others = {path: entry for path, entry in entries.items() if path not in own}
        values = nest(others)
        places = {path[0]: entry for path, entry in reversed(others.items())}
        keys = {
            key: Entry(value, places[key].where, places[key].section_where)
            for key, value in values.items()
        }
        draft = Draft(own, shown)
        file = cls(draft, keys, above, Entry(None, shown))
        for key in [key for key, entry in keys.items() if entry.value in (None, {}, "", [])]:
            draft.without_meaning((key,), keys.pop(key), UNSET)
        for key in [key for key in SWITCHES if key in keys]:
            if not draft.expect_bool((key,), keys[key]):
                del keys[key]
        return file

    def take(self, key: str) -> Entry | None:
        """Returns the entry of a key, if set, and removes it."""
        entry = self.keys.pop(key, None)
        if entry is not None:
            self.taken[key] = entry
        return entry

    def table(self, key: str) -> tuple[Entry | None, dict[str, Any]]:
        """Takes a key that holds a table."""
        entry = self.take(key)
        if entry is not None and not isinstance(entry.value, Mapping):
            self.refuse(key, entry, "expected a table of keys")
            return None, {}
        return entry, {} if entry is None else {str(k): v for k, v in entry.value.items()}

    def value(self, key: str, default: Any = None) -> Any:
        entry = self.take(key)
        return default if entry is None else entry.value

    def rename(self, key: str, today: str) -> None:
        entry = self.take(key)
        if entry is not None:
            self.put(today, entry.value, entry, key)

    def put(self, today: str, value: Any, entry: Entry, key: str = "") -> None:
        """Sets a current key; `key` is the axolotl key that it comes from."""
        path = tuple(today.split("."))
        if isinstance(value, Mapping) and value:
            for name, item in value.items():
                self.draft.put((*path, str(name)), item, entry)
        elif not self.draft.put(path, value, entry):
            self.draft.became(entry, f"{key or today} is ignored, since {today} is also set")
            return
        if key:
            self.renamed.append(f"{key} → {today}")

    def default(self, today: str, value: Any) -> None:
        """Sets axolotl's default for a key that the file does not set."""
        path = tuple(today.split("."))
        if path not in self.draft.entries and path not in self.above:
            self.draft.put(path, value, self.first)
            self.chosen.append(f"{today} = {show_value(value)}")

    def decided(self, today: str) -> bool:
        """Returns whether the file or the command line sets a current key, or a part of it."""
        path = tuple(today.split("."))
        return any(one[: len(path)] == path for one in (*self.above, *self.draft.entries))

    def set_to(self, today: str) -> Any:
        """Returns the value of a current key, if it has one."""
        path = tuple(today.split("."))
        entry = self.above.get(path) or self.draft.entries.get(path)
        return None if entry is None else entry.value

    def note(self, entry: Entry | None, text: str) -> None:
        self.draft.note(entry or self.first, text)

    def refuse(self, key: str, entry: Entry | None, reason: str) -> None:
        self.draft.refuse((key,), entry or self.first, reason)

    def lacks(self, key: str, entry: Entry | None, reason: str) -> None:
        """Reports that another key is missing, unless it may be there under a misspelled name or
        with a value of the wrong type, which is reported instead."""
        source = entry or self.first
        self.lacking.append(Problem(reason, source.where, key, source.value))

    def ignore(self, key: str, reason: str) -> None:
        entry = self.take(key)
        if entry is not None:
            self.draft.without_meaning((key,), entry, reason)

    def every(self, what: str, today: str, otherwise: str) -> None:
        """Translates the steps between saves or validations. Steps per epoch are not known here."""
        entry, per_epoch = self.take(f"{what}_steps"), self.take(f"{what}s_per_epoch")
        if entry is not None and isinstance(entry.value, float) and entry.value < 1:
            self.note(entry, f"{what}_steps is a fraction of the run; set {today}, in steps")
        elif entry is not None:
            whole = isinstance(entry.value, float) and entry.value.is_integer()
            steps = int(entry.value) if whole else entry.value
            self.put(today, steps, entry, f"{what}_steps")
        if per_epoch is not None:
            self.note(
                per_epoch,
                f"{what}s_per_epoch has no equivalent; set {today}, in steps; {otherwise}",
            )

    def finish(self) -> Translated:
        """Returns the result, with a note for every key; keys without one match what Overland
        does."""
        if not self.draft.problems:
            self.draft.problems.extend(self.lacking)
        name, problems = self.first.where, [str(one) for one in self.draft.problems]
        said = "\n".join([*self.renamed, *self.draft.finish().notes, *problems])
        for key, entry in self.taken.items():
            if not re.search(rf"\b{re.escape(key)}\b", said):
                self.draft.without_meaning((key,), entry, SAME)
        about = f"{name}: an axolotl config"
        done = self.draft.finish(about)
        first = [f"{about}, read as: {', '.join(self.renamed)}"]
        routine = done.routine | {first[0]}
        if self.chosen:
            first.append(f"{name}: axolotl's defaults: {', '.join(self.chosen)}")
        return done._replace(notes=first + done.notes, routine=routine)


def folder_of(file: File, entry: Entry, kind: str, parent: str) -> str:
    """Returns a local folder, or the folder to fetch a model of this name to."""
    name = str(entry.value)
    owner, slash, last = name.partition("/")
    on_hub = slash and "/" not in last and owner not in (".", "..", "~", "")
    if not on_hub or Path(name).expanduser().exists():
        return name
    folder = f"{parent}/{last}"
    fetch = command("overland", "fetch", kind, name, "--to", folder)
    file.note(entry, f"{name} is read from {folder}; `{fetch}` downloads it")
    return folder


def listed(value: Any) -> list[Any]:
    """Returns a value that may be single or a list, as a list."""
    return list(value) if isinstance(value, list) else [] if value is None else [value]
