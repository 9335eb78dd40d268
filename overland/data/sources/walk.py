"""All files below a folder, and a word about each that is left out."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

SHOWN = 5


@dataclass
class LeftOut:
    """Files and folders that are not read: how many, and the first of them with the reason."""

    count: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, file: str, reason: str) -> None:
        self.count += 1
        if len(self.shown) < SHOWN:
            self.shown.append(f"{file} ({reason})")

    def __str__(self) -> str:
        if not self.count:
            return ""
        more = f" and {self.count - SHOWN:,} more" if self.count > SHOWN else ""
        files = "file" if self.count == 1 else "files"
        return f"{self.count:,} {files} not read: {', '.join(self.shown)}{more}"


def walk(root: Path, left_out: LeftOut) -> list[str]:
    """The files below a folder, relative to it and in order; nothing hidden.

    Linked folders are followed, unless they lead to one that is read already: into the folder
    itself, above it, or to where another link has led.
    """
    found: list[str] = []
    top = os.path.realpath(root)
    seen = {top}
    folders = [("", top)]
    while folders:
        start, real = folders.pop()
        try:
            with os.scandir(root / start) as listed:
                entries = sorted(listed, key=lambda entry: entry.name, reverse=True)
        except OSError as error:
            left_out.add(start or ".", f"a folder that cannot be opened: {error.strerror}")
            continue
        for entry in entries:
            name = start + entry.name
            if entry.name.startswith("."):
                continue
            try:
                is_folder, is_file = entry.is_dir(), entry.is_file()
            except OSError as error:  # a chain of links without an end
                left_out.add(name, str(error.strerror))
                continue
            if is_file:
                found.append(name)
            elif is_folder:
                is_link = entry.is_symlink()
                leads_to = os.path.realpath(entry.path) if is_link else f"{real}/{entry.name}"
                if leads_to in seen or (is_link and _overlap(leads_to, top)):
                    left_out.add(f"{name}/", "a link to a folder that is read already")
                else:
                    seen.add(leads_to)
                    folders.append((f"{name}/", leads_to))
            else:
                is_link = entry.is_symlink()
                left_out.add(name, "a link to nothing" if is_link else "not a regular file")
    return sorted(found, key=lambda name: name.split("/"))


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")
