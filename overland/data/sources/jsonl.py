"""JSON lines. A large file that is not compressed is read in segments, several at a time if wanted:
a segment holds the lines that begin in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from overland.data.sources.columns import choose_column, did_you_mean
from overland.data.sources.compression import SUFFIXES, open_bytes, reading
from overland.data.sources.source import Bad, Document, FileSource, Kind, part_of, split_part

JSON_SUFFIXES = {".jsonl", ".json", ".ndjson"}
SEGMENT_BYTES = 64 << 20
BOM = b"\xef\xbb\xbf"


class JsonLines(FileSource):
    """One object per line; its documents are one of the object's values."""

    format = "jsonl"

    def __init__(
        self, root: Path, files: list[str], column: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(root, files, skip_bad)
        record = _first_record(root, files)
        self.columns = {name: _type_of(value) for name, value in record.items()}
        kinds = {name: kind for name, value in record.items() if (kind := _kind_of(value))}
        # Without a single good line there is nothing to choose from; reading will say why.
        where = f"{root / files[0]}: its first object"
        self.column = choose_column(where, column, self.columns, kinds) if record else column
        self.kind = kinds.get(self.column or "", "text")

    def chunks(self) -> list[str]:
        return [chunk for file in self.files for chunk in line_chunks(self.root, file)]

    def read(self, chunk: str) -> Iterator[Document]:
        file, part = split_part(chunk)
        return read_lines(self.root / file, part, self.column or "text", self.kind, self.bad)


def line_chunks(root: Path, file: str) -> list[str]:
    with reading(root / file):
        size = (root / file).stat().st_size
    if size <= SEGMENT_BYTES or Path(file).suffix in SUFFIXES:
        return [file]
    return [part_of(file, part) for part in range(-(-size // SEGMENT_BYTES))]


def read_lines(
    path: Path, part: int | None, column: str, kind: Kind, bad: Bad
) -> Iterator[Document]:
    for line, start, place in _lines(path, part):
        if not line.strip():
            continue
        try:
            document = _document(line, column, kind)
        except _Unusable as error:
            bad(f"{path}:{_lines_before(path, start) + place}: {error}")
        else:
            yield document


class _Unusable(Exception):
    pass


def _lines(path: Path, part: int | None) -> Iterator[tuple[bytes, int, int]]:
    """Each line, where the reading began, and the how-manieth line since then it is."""
    start = (part or 0) * SEGMENT_BYTES
    stop = None if part is None else start + SEGMENT_BYTES
    with reading(path), open_bytes(path) as file:
        if start:  # the line under way belongs to the segment before
            file.seek(start - 1)
            start += len(file.readline()) - 1
        for place, line in enumerate(_until(file, stop, start), start=1):
            yield line.removeprefix(BOM) if place == 1 and not start else line, start, place


def _lines_before(path: Path, offset: int) -> int:
    """Takes reading the file up to there, so only a message asks for it."""
    if not offset:
        return 0
    with reading(path), path.open("rb") as file:
        return sum(1 for _ in _until(file, offset))


def _until(file: IO[bytes], stop: int | None, offset: int = 0) -> Iterator[bytes]:
    """The lines that begin before `stop`."""
    while stop is None or offset < stop:
        line = file.readline()
        if not line:
            return
        offset += len(line)
        yield line


def _document(line: bytes, column: str, kind: Kind) -> Document:
    try:
        text = line.decode("utf-8")
        record = json.loads(text)
    except UnicodeDecodeError as error:
        raise _Unusable(
            f"expected UTF-8 text, got {error.reason} at byte {error.start:,}"
        ) from None
    except json.JSONDecodeError as error:
        hint = "; one object per line is read, no array" if text.strip() == "[" else ""
        raise _Unusable(f"not a JSON object: {error.msg}{hint}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits; a deep nest
        raise _Unusable("not a JSON object that can be read") from None
    value = record.get(column) if isinstance(record, dict) else None
    if kind == "tokens" and isinstance(value, list) and _kind_of(value) == "tokens":
        try:
            return np.asarray(value, dtype=np.int64)
        except OverflowError:
            raise _Unusable(f"{column} has an id beyond 64 bits") from None
    if kind == "tokens" or not isinstance(value, str):
        near = did_you_mean(column, record) if isinstance(record, dict) else ""
        what = f'"{column}" of token ids' if kind == "tokens" else f'"{column}"'
        raise _Unusable(f"expected an object with a {what}, got {text.strip()[:60]!r}{near}")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can say half of a surrogate pair, which is no text
        raise _Unusable(f"{column} has half of a surrogate pair, no UTF-8 text") from None
    return value


def _first_record(root: Path, files: list[str]) -> dict[str, Any]:
    for file in files:
        for line, _, _ in _lines(root / file, None):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                return record
    return {}


def _kind_of(value: object) -> Kind | None:
    if isinstance(value, str):
        return "text"
    is_ids = isinstance(value, list) and all(type(item) is int for item in value)
    return "tokens" if is_ids else None


def _type_of(value: object) -> str:
    names = {str: "string", bool: "bool", int: "int", float: "float", type(None): "null"}
    if isinstance(value, list):
        return "list of int" if value and _kind_of(value) else "list"
    return names.get(type(value), "object")
