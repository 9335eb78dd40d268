"""The built-in corpus: the source text of Python's own standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from overland.data.sources.source import FileSource
from overland.errors import DataError

# Left out: third-party packages, generated tables and the test suite, whose long literals are half
# of all text and teach little.
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
HELD_OUT_EVERY = 20


class StandardLibrary(FileSource):
    """On every machine, without a download. Every twentieth file is held out. `part` k of n takes
    every n-th of the others, from the k-th on: small corpora that stand for large ones."""

    format = "stdlib"

    def __init__(self, held_out: bool = False, part: tuple[int, int] = (0, 1)) -> None:
        self.held_out = held_out
        which, of = part
        if of < 1:
            raise DataError(f"stdlib:{which}/{of}: expected at least one part, such as stdlib:0/1")
        if not 0 <= which < of:
            raise DataError(f"stdlib:{which}/{of}: parts are counted from 0 to {of - 1}")
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [
            path for i, path in enumerate(_modules(root)) if (i % HELD_OUT_EVERY == 0) == held_out
        ]
        # Some __init__.py are empty, and a document without a token is an error.
        files = [file for file in files if (root / file).stat().st_size]
        super().__init__(root, files[which::of])

    def num_documents(self, chunk: str) -> int | None:
        return 1

    def read(self, chunk: str) -> Iterator[str]:
        yield (self.root / chunk).read_text(encoding="utf-8", errors="replace")


@cache
def _modules(root: Path) -> list[str]:
    """Without a look into what is left out, which is most of it."""
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED]
        found += [os.path.relpath(os.path.join(folder, file), root)
                  for file in files if file.endswith(".py")]  # fmt: skip
    return sorted(found)
