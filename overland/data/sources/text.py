"""Plain text: a file is a document. A folder may hold JSON lines beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from overland.data.errors import DataError
from overland.data.sources.compression import bare_suffix, open_bytes, reading
from overland.data.sources.jsonl import JSON_SUFFIXES, line_chunks, read_lines
from overland.data.sources.source import Bad, FileSource, decode, split_part

TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".tex"}


def read_text(path: Path, bad: Bad) -> Iterator[str]:
    with reading(path), open_bytes(path) as file:
        text = decode(file.read(), str(path), bad)
        if text is not None:
            yield text


class TextFolder(FileSource):
    """Text files (one document each) and JSON lines (`text` of each line), also compressed."""

    format = "text"

    def __init__(self, path: Path, files: list[str] | None = None, skip_bad: bool = False) -> None:
        if not path.exists():
            raise DataError(f"{path} does not exist")
        root = path.parent if path.is_file() else path
        if files is None:
            found = [path] if path.is_file() else sorted(path.rglob("*"))
            files = [str(one.relative_to(root)) for one in found if _is_text(one)]
        if not files:
            known = ", ".join(sorted(TEXT_SUFFIXES | JSON_SUFFIXES))
            raise DataError(f"{path} holds no text: looked for {known} (also with .gz, .zst)")
        super().__init__(root, files, skip_bad)

    def chunks(self) -> list[str]:
        return [
            chunk
            for file in self.files
            for chunk in (line_chunks(self.root, file) if _is_lines(file) else [file])
        ]

    def num_documents(self, chunk: str) -> int | None:
        return None if _is_lines(split_part(chunk)[0]) else 1

    def read(self, chunk: str) -> Iterator[str]:
        file, part = split_part(chunk)
        if not _is_lines(file):
            yield from read_text(self.root / chunk, self.bad)
            return
        for document in read_lines(self.root / file, part, ("text",), "text", self.bad):
            yield str(document)


def _is_lines(file: str) -> bool:
    return bare_suffix(Path(file)) in JSON_SUFFIXES


def _is_text(path: Path) -> bool:
    return bare_suffix(path) in TEXT_SUFFIXES | JSON_SUFFIXES and path.is_file()
