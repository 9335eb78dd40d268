"""JSON lines: one object per line, one value of which is the document. Files are read in parts.
A file that is one array of objects counts as lines, too.

A part holds the lines that begin in it, so that several processes can share one file and a build
that is killed keeps the parts it finished. Parts are byte ranges: of the file or, if it is
compressed, of its decompressed text. To reach a part of a compressed file, everything before it has
to be decompressed, so there are few parts, and the reader stays open at the end of a part so that
the next one continues there. The length of the text can only be estimated, so the last part takes
whatever is left.
"""

from __future__ import annotations

import bz2
import contextlib
import io
import json
import lzma
import math
import re
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from overland.data.sources.columns import (
    RECORD,
    WHOLE,
    ColumnSample,
    Place,
    check_joinable,
    choose_column,
    column_name,
    joined,
    kind_of_value,
    nearest_hint,
    split_joined,
    values_at,
)
from overland.data.sources.compression import (
    READ_BYTES,
    SUFFIXES,
    XZ_MEMORY,
    is_compressed,
    open_bytes,
    reading,
    times_smaller,
)
from overland.data.sources.json_array import array_items, is_array
from overland.data.sources.source import Bad, Document, FileSource, Kind, Located
from overland.plugins import need

JSON_SUFFIXES = {".jsonl", ".json", ".ndjson"}
# Read to choose the column: this much from all files together, but at least one line of each.
SAMPLE_RECORDS = 1000
SAMPLE_BYTES = 4 << 20
SAMPLE_FILES = 16
NO_ARRAY = "; expected one object per line, not an array"
PART_BYTES = 4 << 20  # takes one core a second; a shard is made of several
LONGEST_LINE = 256 << 20  # parsing takes four times as much memory
MAX_PARTS = 32  # of a compressed file, which is decompressed up to the start of each
FEW_FILES = 64  # only with fewer compressed files is the expansion of each one measured
USUAL_EXPANSION = 3
HEAD_BYTES = 1 << 20
UNFOLDED_BYTES = 64 << 20
BOM = b"\xef\xbb\xbf"
RANGE = re.compile(r"(.*)#(\d+)-(\d*)", re.DOTALL)


class JsonLines(FileSource):
    """One object per line; one of the object's values holds the documents."""

    format = "jsonl"

    def __init__(
        self, root: Path, files: list[str], column: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(root, files, skip_bad)
        sample = sample_lines(root, files)
        name, self._joins = split_joined(column) if column is not None else (None, False)
        columns = sample.columns(name)
        self.columns = {name: column.type for name, column in columns.items()}
        # Without a single good line there is nothing to choose from; reading will report why.
        if columns:
            self.column = choose_column(self.place, column, columns, lambda: sample.examples)
        else:
            self.column = name
        chosen = RECORD if self.column == WHOLE else columns.get(self.column or "")
        self.kind = (chosen.kind if chosen else None) or "text"
        self._path = chosen.place if chosen else (self.column or "text",)
        if self._joins:
            check_joinable(self.place, column, self.kind)
            self.column = column
        self._line_bytes = sample.num_bytes / max(sample.num_lines, 1)

    def chunks(self) -> list[str]:
        return list(line_chunks(self.root, self.files))

    def files_of(self, chunk: str) -> list[str]:
        return [split_lines(chunk, self.names)[0]]

    def num_bytes(self, chunk: str) -> int | None:
        return bytes_of_part(chunk, self.names)

    def about_documents(self) -> int | None:
        if not self._line_bytes:
            return None
        sizes = ((self.root / file).stat().st_size * times_smaller(file) for file in self.files)
        return round(sum(sizes) / self._line_bytes)

    def read(self, chunk: str) -> Iterator[Document]:
        file, part = split_lines(chunk, self.names)
        return read_lines(self.root / file, part, self._path, self.kind, self.bad, self._joins)


def read_lines(
    path: Path, part: LineRange, column: Place, kind: Kind, bad: Bad, joins: bool = False
) -> Iterator[Document]:
    for line, start, place in read_part(path, part):
        is_too_long = len(line) > LONGEST_LINE
        if not is_too_long and not line.strip():
            continue
        where = lambda start=start, place=place: f"{path}:{lines_before(path, start) + place}"
        try:
            if is_too_long:
                raise _Unusable(f"a line of more than {LONGEST_LINE:,} bytes; split the document")
            record, text = _parse(line)
        except _Unusable as error:
            bad(f"{where()}: {error}")
            continue
        texts: list[str] = []
        for value in values_at(record, column):
            try:
                document = _document(value, column, kind, record, text)
            except _Unusable as error:
                bad(f"{where()}: {error}")
                continue
            if joins:
                texts.append(str(document))
            else:
                yield Located(document, where) if isinstance(document, dict) else document
        if texts:
            yield joined(texts)


class _Unusable(Exception):
    pass


def _parse(line: bytes) -> tuple[object, str]:
    """Returns the parsed line, and its text."""
    try:
        text = line.decode("utf-8")
        return json.loads(text, object_pairs_hook=_without_repeats), text
    except UnicodeDecodeError as error:
        raise _Unusable(
            f"expected UTF-8 text, got {error.reason} at byte {error.start:,}"
        ) from None
    except json.JSONDecodeError as error:
        hint = NO_ARRAY if text.strip() == "[" else ""
        message = error.msg.removesuffix(" at")  # Python goes on with the place
        raise _Unusable(f"not a JSON object: {message} at column {error.colno:,}{hint}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, or deep nesting
        raise _Unusable("not a JSON object that can be read") from None


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Unusable(
            f"the key {twice!r} is there twice, so it is not clear which value is meant"
        )
    return record


def _document(value: object, column: Place, kind: Kind, record: object, line: str) -> Document:
    if kind == "records":
        if not isinstance(value, dict):
            near = NO_ARRAY if isinstance(record, list) else ""
            raise _Unusable(f"expected an object, got {line.strip()[:60]!r}{near}")
        return value
    if kind == "tokens" and isinstance(value, list) and kind_of_value(value) == "tokens":
        if value and not 0 <= min(value) <= max(value) < 1 << 63:
            wrong = min(value) if min(value) < 0 else max(value)
            raise _Unusable(f"{column_name(column)} has {wrong:,}, which is not a token id")
        return np.asarray(value, dtype=np.int64)
    if kind == "tokens" or not isinstance(value, str):
        what = f'"{column_name(column)}"' + (" of token ids" if kind == "tokens" else "")
        near = NO_ARRAY if isinstance(record, list) else ""
        if isinstance(record, dict) and column[0] not in record:
            near = nearest_hint(str(column[0]), record)
        raise _Unusable(f"expected an object with a {what}, got {line.strip()[:60]!r}{near}")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can encode half of a surrogate pair, which is not text
        raise _Unusable(
            f"{column_name(column)} has half of a surrogate pair, so it is not UTF-8 text"
        ) from None
    return value


def sample_lines(root: Path, files: Sequence[str]) -> ColumnSample:
    """Samples the first records of some files, spread evenly over all of them."""
    sample = ColumnSample()
    chosen = [files[len(files) * i // SAMPLE_FILES] for i in range(SAMPLE_FILES)]
    chosen = list(dict.fromkeys(chosen))
    for file in chosen:
        num_bytes = 0
        for number, (line, _, _) in enumerate(read_part(root / file, LineRange()), start=1):
            with contextlib.suppress(ValueError, RecursionError):
                if len(line) <= LONGEST_LINE:
                    sample.add(json.loads(line))
            num_bytes += len(line)
            sample.num_lines += 1
            sample.num_bytes += len(line)
            if number * len(chosen) >= SAMPLE_RECORDS or num_bytes * len(chosen) >= SAMPLE_BYTES:
                break
    return sample


class LineRange(NamedTuple):
    """The lines of a file that begin at bytes [start, stop), or from `start` on."""

    start: int = 0
    stop: int | None = None


def split_lines(chunk: str, files: frozenset[str]) -> tuple[str, LineRange]:
    """Returns the file and the part that a chunk names."""
    if chunk in files:
        return chunk, LineRange()
    if found := RANGE.fullmatch(chunk):
        return found[1], LineRange(int(found[2]), int(found[3]) if found[3] else None)
    return chunk, LineRange()


def line_chunks(root: Path, files: Sequence[str]) -> Iterator[str]:
    """Yields the chunks of all files, one file after another."""
    looks = sum(map(is_compressed, files)) < FEW_FILES
    for file in files:
        with reading(root / file):
            size = (root / file).stat().st_size
        if is_array(root / file):
            yield file
        elif is_compressed(file):
            size *= _expansion(root / file) if looks else USUAL_EXPANSION
            yield from _ranges(file, size, max(PART_BYTES, -(-size // MAX_PARTS)))
        else:
            yield from _ranges(file, size, PART_BYTES)


def bytes_of_part(chunk: str, files: frozenset[str]) -> int | None:
    """Returns the bytes of a part's text, if its name says."""
    _, part = split_lines(chunk, files)
    if not (part.start or part.stop):
        return None
    return PART_BYTES if part.stop is None else part.stop - part.start


def read_part(path: Path, part: LineRange) -> Iterator[tuple[bytes, int, int]]:
    """Yields each line, the offset where reading began, and the line's number from there. A line
    longer than `LONGEST_LINE` is cut off one byte after that. The items of an array count as
    lines."""
    if is_array(path):
        yield from ((item, 0, n) for n, item in enumerate(array_items(path, LONGEST_LINE), start=1))
        return
    with reading(path):
        file, start = _open_at(path, part)
        offset, place = start, 0
        try:
            while part.stop is None or offset < part.stop:
                line = file.readline(LONGEST_LINE + 1)
                if not line:
                    break
                offset, place = offset + len(line), place + 1
                yield line.removeprefix(BOM) if place == 1 and not start else line, start, place
                if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                    offset += _skip_line(file)
            if part.stop is not None and is_compressed(path.name):
                file = _keep(path, file, offset, part.stop)
        finally:
            file.close()


def lines_before(path: Path, offset: int) -> int:
    """Counts lines, which means reading the file up to there: only messages need it."""
    return sum(1 for _ in read_part(path, LineRange(0, offset))) if offset else 0


def _ranges(file: str, size: int, step: int) -> list[str]:
    starts = [step * i for i in range(max(1, round(size / step)))]
    if len(starts) == 1:
        return [file]
    return [f"{file}#{start}-{start + step}" for start in starts[:-1]] + [f"{file}#{starts[-1]}-"]


class _KeptReader(NamedTuple):
    key: tuple[str, int, int]
    file: IO[bytes]
    offset: int
    """Its position, which is the beginning of a line."""
    stop: int
    """The end of the part that it has read: no line begins between this and `offset`."""


_kept: list[_KeptReader] = []  # one at most
_lock = threading.Lock()


def _open_at(path: Path, part: LineRange) -> tuple[IO[bytes], int]:
    """Opens a file at the first line that begins in the part, and returns its offset, too."""
    if not part.start:
        return open_bytes(path), 0
    kept = _take(path, part.start) if is_compressed(path.name) else None
    if kept is not None and kept.stop == part.start:
        return kept.file, kept.offset
    file, offset = (kept.file, kept.offset) if kept is not None else (open_bytes(path), 0)
    # The line that is under way at the start belongs to the previous part.
    if is_compressed(path.name):
        while offset < part.start - 1:
            data = file.read(min(READ_BYTES, part.start - 1 - offset))
            if not data:
                return file, offset
            offset += len(data)
    else:
        offset = file.seek(part.start - 1)
    return file, offset + _skip_line(file)


def _skip_line(file: IO[bytes]) -> int:
    """Moves to the beginning of the next line, and returns how many bytes were skipped."""
    skipped = 0
    while line := file.readline(READ_BYTES):
        skipped += len(line)
        if line.endswith(b"\n"):
            break
    return skipped


def _keep(path: Path, file: IO[bytes], offset: int, stop: int) -> IO[bytes]:
    """Keeps a reader open for the next part; returns the file to close instead."""
    with _lock:
        _kept.append(_KeptReader(_key(path), file, offset, stop))
        return _kept.pop(0).file if len(_kept) > 1 else io.BytesIO()


def _take(path: Path, start: int) -> _KeptReader | None:
    with _lock:
        kept = _kept.pop() if _kept else None
    if kept is None:
        return None
    if kept.key == _key(path) and (kept.stop == start or kept.offset < start):
        return kept
    kept.file.close()
    return None


def _key(path: Path) -> tuple[str, int, int]:
    stat = path.stat()
    return str(path), stat.st_size, stat.st_mtime_ns


def _expansion(path: Path) -> int:
    """Estimates from the beginning of a file how many times longer its text is: a power of two."""
    with reading(path), path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    unfolded = 0
    with contextlib.suppress(
        OSError, EOFError, ValueError, zlib.error, lzma.LZMAError
    ):  # reading will report why
        unfolded, unused = _unfold(path, head)
        head = head[: len(head) - unused]
    return 2 ** max(0, round(math.log2(unfolded / len(head)))) if unfolded and head else 1


def _unfold(path: Path, head: bytes) -> tuple[int, int]:
    """Returns how many bytes the beginning of a file expands to, and how many of its bytes were not
    used for that."""
    makers: dict[str, Any] = {
        ".gz": lambda: zlib.decompressobj(wbits=31),
        ".xz": lambda: lzma.LZMADecompressor(memlimit=XZ_MEMORY),
        ".bz2": bz2.BZ2Decompressor,
    }
    assert path.suffix.lower() in SUFFIXES
    make = makers.get(path.suffix.lower())
    if make is not None:
        decompressor = make()
        text = decompressor.decompress(head, UNFOLDED_BYTES)
        rest = decompressor.unused_data or getattr(decompressor, "unconsumed_tail", b"")
        return len(text), len(rest)
    zstd: Any = need("zstandard", f"{path}: zstd")
    try:
        reader = zstd.ZstdDecompressor().stream_reader(io.BytesIO(head), read_across_frames=True)
        return len(reader.read(UNFOLDED_BYTES)), 0
    except zstd.ZstdError:
        return 0, 0
