"""The source code of Python's standard library: text that every machine has, without a download."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from overland.data.sources.source import FileSource
from overland.errors import DataError

# Skipped: third-party packages, generated tables, and the test suite, whose long literals are half
# of all text and teach a model little.
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
HELD_OUT_EVERY = 20


class StandardLibrary(FileSource):
    """Every twentieth file is held out. `part` (k, n) takes every n-th of the others, starting with
    the k-th, to make small corpora that stand in for large ones."""

    format = "stdlib"

    def __init__(self, held_out: bool = False, part: tuple[int, int] = (0, 1)) -> None:
        root, modules = library_modules()
        files = [path for i, path in enumerate(modules) if (i % HELD_OUT_EVERY == 0) == held_out]
        # Some __init__.py are empty, and a document without tokens is an error.
        files = [file for file in files if (root / file).stat().st_size]
        super().__init__(root, part_of_files(files, self.format, part))

    def num_documents(self, chunk: str) -> int | None:
        return 1

    def read(self, chunk: str) -> Iterator[str]:
        yield (self.root / chunk).read_text(encoding="utf-8", errors="replace")


def part_of_files(files: list[str], name: str, part: tuple[int, int]) -> list[str]:
    """Returns part k of n: every n-th file, starting with the k-th."""
    which, of = part
    if of < 1:
        raise DataError(f"{name}:{which}/{of}: expected at least one part, such as {name}:0/1")
    if not 0 <= which < of:
        raise DataError(f"{name}:{which}/{of}: parts are numbered from 0 to {of - 1}")
    return files[which::of]


def library_modules() -> tuple[Path, list[str]]:
    """Returns the folder of Python's standard library, and the modules in it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return root, _modules(root)


@cache
def _modules(root: Path) -> list[str]:
    """Lists modules without entering the skipped folders, which hold most of the files."""
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED]
        found += [os.path.relpath(os.path.join(folder, file), root)
                  for file in files if file.endswith(".py")]  # fmt: skip
    return sorted(found)
