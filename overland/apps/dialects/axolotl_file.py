"""An axolotl file while it is being translated: which keys are left, and the notes on those that
were renamed, ignored, or set to axolotl's defaults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overland.apps.dialects.axolotl_keys import SWITCHES
from overland.apps.dialects.draft import SAME, Draft, is_on, path_of
from overland.config.errors import Problem, show_value
from overland.config.fields import sections
from overland.config.source import Entries, Entry, KeyPath, Translated, nest
from overland.words import command

UNSET = "empty values have no effect"


class File(Draft):
    """The keys of a file that are still to be translated, and the results so far. Sections in
    current keys may appear alongside axolotl's keys, and win."""

    def __init__(self, entries: Entries, shown: str, above: Entries) -> None:
        own = {p: e for p, e in entries.items() if p[0] in sections() and len(p) > 1}
        super().__init__(own, shown, above)
        self.asked: set[str] = set()
        """Keys that were looked for, whether the file has them or not."""
        self.taken: dict[str, Entry] = {}
        self.renamed: list[str] = []
        self.chosen: list[str] = []
        self.lacking: list[Problem] = []
        others = {path: entry for path, entry in entries.items() if path not in own}
        places = {path[0]: entry for path, entry in reversed(others.items())}
        self.keys = {
            key: Entry(value, places[key].where, places[key].section_where)
            for key, value in nest(others).items()
        }
        for key in [key for key, entry in self.keys.items() if entry.value in (None, {}, "", [])]:
            self.without_meaning(key, self.keys.pop(key), UNSET)
        for key in [key for key in SWITCHES if key in self.keys]:
            if not self.expect_bool(key, self.keys[key]):
                del self.keys[key]

    def take(self, key: str) -> Entry | None:
        """Returns the entry of a key, if set, and removes it."""
        self.asked.add(key)
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

    def switch(self, key: str, today: Mapping[str, Any]) -> None:
        """Sets current keys if a key is on."""
        entry = self.take(key)
        if is_on(entry):
            for name, value in today.items():
                self.put(name, value, entry, key)

    def put(self, today: str | KeyPath, value: Any, source: Entry, key: str = "") -> bool:
        """Sets a current key; `key` is the axolotl key that it comes from."""
        assert isinstance(today, str)
        if isinstance(value, Mapping) and value:
            for name, item in value.items():
                super().put((*path_of(today), str(name)), item, source)
        elif not super().put(today, value, source):
            self.became(source, f"{key or today} is ignored, since {today} is also set")
            return False
        if key:
            self.renamed.append(f"{key} → {today}")
        return True

    def default(self, today: str, value: Any) -> None:
        """Sets axolotl's default for a key that the file does not set."""
        path = path_of(today)
        if path not in self.entries and path not in self.above:
            super().put(path, value, self.first)
            self.chosen.append(f"{today} = {show_value(value)}")

    def lacks(self, key: str, entry: Entry | None, reason: str) -> None:
        """Reports that another key is missing, unless it may be there under a misspelled name or
        with a value of the wrong type, which is reported instead."""
        source = entry or self.first
        self.lacking.append(Problem(reason, source.where, key, source.value))

    def ignore(self, key: str, reason: str) -> None:
        self.without_meaning(key, self.take(key), reason)

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
            text = f"{what}s_per_epoch has no equivalent; set {today}, in steps; {otherwise}"
            self.note(per_epoch, text)

    def finish(self, about: str = "") -> Translated:
        """Returns the result, with a note for every key; keys without one match what Overland
        does."""
        if not self.problems:
            self.problems.extend(self.lacking)
        problems = [str(one) for one in self.problems]
        said = "\n".join([*self.renamed, *super().finish().notes, *problems])
        for key, entry in self.taken.items():
            if not re.search(rf"\b{re.escape(key)}\b", said):
                self.without_meaning(key, entry, SAME)
        about = f"{self.first.where}: an axolotl config"
        done = super().finish(about)
        first = [f"{about}, read as: {', '.join(self.renamed)}"]
        routine = done.routine | {first[0]}
        if self.chosen:
            first.append(f"{self.first.where}: axolotl's defaults: {', '.join(self.chosen)}")
        return done._replace(notes=first + done.notes, routine=routine)


def folder_of(file: File, entry: Entry, kind: str) -> str:
    """Returns a local folder, or the folder to fetch a model of this name to."""
    name = str(entry.value)
    owner, slash, last = name.partition("/")
    on_hub = slash and "/" not in last and owner not in (".", "..", "~", "")
    if not on_hub or Path(name).expanduser().exists():
        return name
    folder = f"assets/hf/{last}"
    fetch = command("overland", "fetch", kind, name, "--to", folder)
    file.note(entry, f"{name} is read from {folder}; `{fetch}` downloads it")
    return folder


def listed(value: Any) -> list[Any]:
    """Returns a value that may be single or a list, as a list."""
    return list(value) if isinstance(value, list) else [] if value is None else [value]
