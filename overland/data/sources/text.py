"""Plain text: a file is a document. A folder may hold JSON lines and CSV beside it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from overland.data.sources.compression import bare_suffix, read_whole, reading
from overland.data.sources.csv_rows import read_rows
from overland.data.sources.jsonl import JSON_SUFFIXES, read_lines
from overland.data.sources.lines import line_chunks, num_bytes, split_lines
from overland.data.sources.source import Bad, FileSource, decode
from overland.data.sources.walk import LeftOut, walk
from overland.errors import DataError

TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".tex"}


def read_text(path: Path, bad: Bad) -> Iterator[str]:
    with reading(path):
        text = decode(read_whole(path), str(path), bad)
        if text is not None:
            yield text


class TextFolder(FileSource):
    """Text files (one document each), JSON lines and CSV (`text` of each), also compressed."""

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
            raise DataError(f"{path} holds no text: looked for {known} (also compressed)")
        super().__init__(root, files, skip_bad)
        if column not in (None, "text"):
            if all(map(_is_one, files)):
                raise DataError(f"{path} is text: it has no column {column!r}, nor any other")
            self.column = column

    def chunks(self) -> list[str]:
        lines = [file for file in self.files if _is_lines(file)]
        parts: dict[str, list[str]] = {file: [] for file in lines}
        for chunk in line_chunks(self.root, lines, self.rules):
            parts[split_lines(chunk, self.names)[0]].append(chunk)
        return [chunk for file in self.files for chunk in parts.get(file, [file])]

    def files_of(self, chunk: str) -> list[str]:
        return [split_lines(chunk, self.names)[0]]

    def num_bytes(self, chunk: str) -> int | None:
        return num_bytes(chunk, self.names)

    def num_documents(self, chunk: str) -> int | None:
        return 1 if _is_one(split_lines(chunk, self.names)[0]) else None

    def read(self, chunk: str) -> Iterator[str]:
        file, part = split_lines(chunk, self.names)
        if not _is_lines(file):
            read = read_text if _is_one(file) else partial(read_rows, column=self.column or "text")
            yield from read(self.root / file, bad=self.bad)
            return
        column = (self.column or "text",)
        for document in read_lines(self.root / file, part, column, "text", self.bad):
            yield str(document)


def _is_lines(file: str) -> bool:
    return bare_suffix(Path(file)) in JSON_SUFFIXES


def _is_one(file: str) -> bool:
    """Whether all of the file is one document."""
    return bare_suffix(Path(file)) in TEXT_SUFFIXES


def _is_text(file: str) -> bool:
    return bare_suffix(Path(file)) in TEXT_SUFFIXES | JSON_SUFFIXES
