"""Plain text: each file is a document. A folder may also contain JSON lines and CSV.

The built-in corpus is text, too: the source code of Python's standard library.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

from overland.data.sources.columns import WHOLE
from overland.data.sources.compression import bare_suffix, read_whole, reading
from overland.data.sources.csv_rows import read_rows
from overland.data.sources.jsonl import (
    JSON_SUFFIXES,
    bytes_of_part,
    line_chunks,
    read_lines,
    split_lines,
)
from overland.data.sources.source import Bad, FileSource, LeftOut, decode, walk
from overland.errors import DataError

TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".tex"}
# Skipped: third-party packages, generated tables, and the test suite, whose long literals are half
# of all text and teach a model little.
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
HELD_OUT_EVERY = 20


def read_text_file(path: Path, bad: Bad) -> Iterator[str]:
    with reading(path):
        text = decode(read_whole(path), str(path), bad)
        if text is not None:
            yield text


class TextFolder(FileSource):
    """Text files (one document each), JSON lines and CSV (their `text` column), also compressed."""

    format = "text"

    def __init__(
        self,
        path: Path,
        files: list[str] | None = None,
        skip_bad: bool = False,
        column: str | None = None,
    ) -> None:
        if not path.exists():
            raise DataError(f"{path} does not exist")
        root = path.parent if path.is_file() else path
        if files is None:
            found = [path.name] if path.is_file() else walk(path, LeftOut())
            files = [one for one in found if _is_text(one)]
        if not files:
            known = ", ".join(sorted(TEXT_SUFFIXES | JSON_SUFFIXES))
            raise DataError(f"{path} contains no text: looked for {known} (also compressed)")
        super().__init__(root, files, skip_bad)
        if column == WHOLE:
            raise DataError(
                f"{path} is text, or mixes formats: records must all be in one format, which can "
                "be JSON lines, CSV, parquet, Arrow or MDS"
            )
        if column not in (None, "text"):
            if all(map(_is_one, files)):
                raise DataError(
                    f"{path} is plain text: it has no columns, so there is no {column!r}"
                )
            self.column = column

    def chunks(self) -> list[str]:
        lines = [file for file in self.files if _is_lines(file)]
        parts: dict[str, list[str]] = {file: [] for file in lines}
        for chunk in line_chunks(self.root, lines):
            parts[split_lines(chunk, self.names)[0]].append(chunk)
        return [chunk for file in self.files for chunk in parts.get(file, [file])]

    def files_of(self, chunk: str) -> list[str]:
        return [split_lines(chunk, self.names)[0]]

    def num_bytes(self, chunk: str) -> int | None:
        return bytes_of_part(chunk, self.names)

    def num_documents(self, chunk: str) -> int | None:
        return 1 if _is_one(split_lines(chunk, self.names)[0]) else None

    def read(self, chunk: str) -> Iterator[str]:
        file, part = split_lines(chunk, self.names)
        if not _is_lines(file):
            read = (
                read_text_file
                if _is_one(file)
                else partial(read_rows, column=self.column or "text")
            )
            yield from read(self.root / file, bad=self.bad)
            return
        column = (self.column or "text",)
        for document in read_lines(self.root / file, part, column, "text", self.bad):
            yield str(document)


class StandardLibrary(FileSource):
    """The source code of Python's standard library, on every machine without a download.

    Every twentieth file is held out. `part` (k, n) takes every n-th of the others, starting with
    the k-th, to make small corpora that stand in for large ones.
    """

    format = "stdlib"

    def __init__(self, held_out: bool = False, part: tuple[int, int] = (0, 1)) -> None:
        self.held_out = held_out
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


def _is_lines(file: str) -> bool:
    return bare_suffix(Path(file)) in JSON_SUFFIXES


def _is_one(file: str) -> bool:
    """Whether the whole file is one document."""
    return bare_suffix(Path(file)) in TEXT_SUFFIXES


def _is_text(file: str) -> bool:
    return bare_suffix(Path(file)) in TEXT_SUFFIXES | JSON_SUFFIXES


@cache
def _modules(root: Path) -> list[str]:
    """Lists modules without entering the skipped folders, which hold most of the files."""
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in STDLIB_SKIPPED]
        found += [os.path.relpath(os.path.join(folder, file), root)
                  for file in files if file.endswith(".py")]  # fmt: skip
    return sorted(found)
