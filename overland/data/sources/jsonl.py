"""JSON lines, one record per line, or an array of records in a .json file: the documents in them,
and how a file, compressed or not, is divided into parts that several processes can read.

A part holds the lines that begin in it, so that several processes can share one file and a build
that is killed keeps the parts it finished. Parts are byte ranges: of the file or, if it is
compressed, of its decompressed text. To reach a part of a compressed file, everything before it has
to be decompressed, so there are few parts, and the reader stays open at the end of a part so that
the next one continues there. The length of the text can only be estimated, so the last part takes
whatever is left.

A .json file may also be an array of objects, as public fine-tuning datasets often are
(`alpaca_data.json`), or several arrays, as `cat a.json b.json` joins them. It is one part, and its
items count as lines; only one item is in memory.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from overland.data.sources.columns import NO_ARRAY, WHOLE, ColumnFiles, ColumnSample
from overland.data.sources.compression import (
    READ_BYTES,
    bare_suffix,
    decode,
    is_compressed,
    measured_times_smaller,
    open_bytes,
    reading,
    times_smaller,
)
from overland.data.sources.source import Bad, BadDocument, Document
from overland.errors import DataError

JSON_SUFFIXES = {".jsonl", ".json", ".ndjson"}
PART_BYTES = 4 << 20  # takes one core a second; a shard is made of several
LONGEST_LINE = 256 << 20  # parsing takes four times as much memory
MAX_PARTS = 32  # of a compressed file, which is decompressed up to the start of each
RANGE = re.compile(r"(.*)#(\d+)-(\d*)", re.DOTALL)
BOM = "\ufeff"
BLANKS = re.compile(f"[ \\t\\r\\n{BOM}]*")  # joined files may have several byte order marks
BETWEEN = re.compile(r"\s*[,\]]")  # items of an array
HEAD_BYTES = 256  # blanks before an array
# Read to choose the column: this much from all files together, but at least one line of each.
SAMPLE_RECORDS = 1000
SAMPLE_BYTES = 4 << 20
SAMPLE_FILES = 16
FEW_FILES = 64  # only with fewer compressed files is the expansion of each one measured


class LineRange(NamedTuple):
    """The lines of a file that begin at bytes [start, stop), or from `start` on."""

    start: int = 0
    stop: int | None = None


class LineFiles(ColumnFiles):
    """Files of which some, or all, are JSON lines; a chunk is a part of one, or any other file."""

    def chunks(self) -> list[str]:
        lines = {file for file in self.files if bare_suffix(Path(file)) in JSON_SUFFIXES}
        measures = sum(map(is_compressed, lines)) < FEW_FILES
        return [
            chunk
            for file in self.files
            for chunk in (parts_of(self.root, file, measures) if file in lines else [file])
        ]

    def files_of(self, chunk: str) -> list[str]:
        return [self._part(chunk)[0]]

    def num_bytes(self, chunk: str) -> int | None:
        _, part = self._part(chunk)
        if part == LineRange():
            return None
        return PART_BYTES if part.stop is None else part.stop - part.start

    def read(self, chunk: str) -> Iterator[Document]:
        file, part = self._part(chunk)
        for record, text, where in read_records(self.root / file, part, self.bad):
            yield from self.documents(record, where, text)

    def _part(self, chunk: str) -> tuple[str, LineRange]:
        """Returns the file and the part that a chunk names."""
        found = None if chunk in self.names else RANGE.fullmatch(chunk)
        if found is None:
            return chunk, LineRange()
        return found[1], LineRange(int(found[2]), int(found[3]) if found[3] else None)


class JsonLines(LineFiles):
    """One object per line; one of the object's values holds the documents."""

    format = "jsonl"

    def __init__(
        self, root: Path, files: list[str], column: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(root, files, skip_bad)
        self.line_bytes, sample = sample_lines(root, files)
        columns = sample.columns(column)
        # Without a single good line there is nothing to choose from; reading will report why.
        if columns or column == WHOLE:
            self.choose(self.place, column, columns, lambda: sample.examples)
        elif column is not None:
            self.column, self.steps = column, (column,)


def sample_lines(root: Path, files: Sequence[str]) -> tuple[float, ColumnSample]:
    """Samples the first records of some files, spread evenly over all of them. Returns the mean
    length of a line, too."""
    sample = ColumnSample()
    chosen = dict.fromkeys(files[len(files) * i // SAMPLE_FILES] for i in range(SAMPLE_FILES))
    num_lines = all_bytes = 0
    for file in chosen:
        num_bytes = 0
        for number, (line, _) in enumerate(read_part(root / file, LineRange()), start=1):
            with contextlib.suppress(ValueError, RecursionError):
                if len(line) <= LONGEST_LINE:
                    sample.add(json.loads(line))
            num_bytes, num_lines = num_bytes + len(line), num_lines + 1
            if number * len(chosen) >= SAMPLE_RECORDS or num_bytes * len(chosen) >= SAMPLE_BYTES:
                break
        all_bytes += num_bytes
    return all_bytes / max(num_lines, 1), sample


class Line(NamedTuple):
    """The place of a line. Its number is only counted, by reading the file up to there, if it is
    needed for a message."""

    path: Path
    start: int
    """The offset where reading began."""
    place: int
    """The line's number from there."""

    def __str__(self) -> str:
        part = LineRange(0, self.start)
        before = sum(1 for _ in read_part(self.path, part)) if self.start else 0
        return f"{self.path}:{before + self.place}"


def read_records(path: Path, part: LineRange, bad: Bad) -> Iterator[tuple[object, str, Line]]:
    """Yields each record of a part, its text, and where it is."""
    for line, where in read_part(path, part):
        if len(line) > LONGEST_LINE:
            bad(f"{where}: a line of more than {LONGEST_LINE:,} bytes; split the document")
            continue
        text = decode(line, where, bad) if line.strip() else None
        if text is None:
            continue
        try:
            record = json.loads(text, object_pairs_hook=_without_repeats)
        except json.JSONDecodeError as error:
            message = error.msg.removesuffix(" at")  # Python goes on with the place
            hint = NO_ARRAY if text.strip() == "[" else ""
            bad(f"{where}: not a JSON object: {message} at column {error.colno:,}{hint}")
        except BadDocument as error:
            bad(f"{where}: {error}")
        except (ValueError, RecursionError):  # a number of thousands of digits, or deep nesting
            bad(f"{where}: not a JSON object that can be read")
        else:
            yield record, text, where


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadDocument(
            f"the key {twice!r} appears twice, so it is not clear which value is meant"
        )
    return record


def parts_of(root: Path, file: str, measures: bool) -> list[str]:
    """Returns the chunks of a file. The expansion of a compressed one is measured or assumed."""
    path = root / file
    with reading(path):
        size, step = path.stat().st_size, PART_BYTES
    if is_array(path):
        return [file]
    if is_compressed(file):
        size *= measured_times_smaller(path) if measures else times_smaller(file)
        step = max(step, -(-size // MAX_PARTS))
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


_kept: deque[_KeptReader] = deque(maxlen=1)


def read_part(path: Path, part: LineRange) -> Iterator[tuple[bytes, Line]]:
    """Yields each line of a part and where it is. A line longer than `LONGEST_LINE` is cut off one
    byte after that."""
    if is_array(path):
        for place, item in enumerate(_array_items(path), start=1):
            yield item, Line(path, 0, place)
        return
    with reading(path), contextlib.ExitStack() as opened:
        file, start = _open_at(path, part)
        opened.enter_context(file)
        offset, place = start, 0
        while (part.stop is None or offset < part.stop) and (
            line := file.readline(LONGEST_LINE + 1)
        ):
            offset, place = offset + len(line), place + 1
            is_first = place == 1 and not start
            yield line.removeprefix(BOM.encode()) if is_first else line, Line(path, start, place)
            if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                offset += _skip_line(file)
        if part.stop is not None and is_compressed(path.name):
            opened.pop_all()  # stays open
            _kept.append(_KeptReader(_key(path), file, offset, part.stop))


def _open_at(path: Path, part: LineRange) -> tuple[IO[bytes], int]:
    """Opens a file at the first line that begins in the part, and returns its offset, too."""
    file, offset = _continued(path, part.start) or (open_bytes(path), 0)
    if offset >= part.start:
        return file, offset
    # The line that is under way at the start belongs to the previous part.
    if is_compressed(path.name):
        while data := file.read(min(READ_BYTES, part.start - 1 - offset)):
            offset += len(data)
    else:
        offset = file.seek(part.start - 1)
    return file, offset + _skip_line(file)


def _continued(path: Path, start: int) -> tuple[IO[bytes], int] | None:
    """Returns the kept reader and its offset, if it can read on from there."""
    try:
        kept = _kept.pop()
    except IndexError:
        return None
    if kept.key == _key(path) and kept.stop <= start:
        return kept.file, kept.offset
    kept.file.close()
    return None


def _key(path: Path) -> tuple[str, int, int]:
    stat = path.stat()
    return str(path), stat.st_size, stat.st_mtime_ns


def _skip_line(file: IO[bytes]) -> int:
    """Moves to the beginning of the next line, and returns how many bytes were skipped."""
    skipped = 0
    while line := file.readline(READ_BYTES):
        skipped += len(line)
        if line.endswith(b"\n"):
            break
    return skipped


def is_array(path: Path) -> bool:
    """Whether a file is one array. Only .json files can be; .jsonl and .ndjson have lines."""
    if bare_suffix(path) != ".json":
        return False
    with reading(path), open_bytes(path) as file:
        head = file.read(HEAD_BYTES)
    return head.removeprefix(BOM.encode()).lstrip().startswith(b"[")


def _array_items(path: Path) -> Iterator[bytes]:
    """Yields the text of each item. Invalid JSON is an error even if bad documents are skipped,
    because nothing that follows it can be read."""
    # Invalid UTF-8 spoils only the item that contains it; its bytes are passed through unchanged.
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    scan = json.JSONDecoder().raw_decode
    with reading(path), open_bytes(path) as file:
        # `at` moves on inside of `text`, which is copied only when more is read.
        text, at, is_whole, number = "", 0, False, 1

        def more() -> None:
            nonlocal text, at, is_whole
            data = file.read(max(READ_BYTES, len(text) - at))  # an item is scanned few times
            is_whole = not data
            text, at = text[at:] + decoder.decode(data, final=is_whole), 0

        def next_character() -> str:
            """Skips blanks; returns an empty string at the end of the file."""
            nonlocal at
            while True:
                at = BLANKS.match(text, at).end()  # type: ignore[union-attr]
                if at < len(text) or is_whole:
                    return text[at : at + 1]
                more()

        while first := next_character():
            if first != "[":
                raise DataError(
                    f"{path}: {text[at : at + 40]!r} follows its JSON array: after an array there "
                    "may only be another one; put the rest into a file of its own"
                )
            at, border = at + 1, None
            while border != "]":
                if next_character() == "]":
                    if border is not None:
                        raise DataError(
                            f"{path}:{number}: a comma before the end of the JSON array"
                        )
                    at, border = at + 1, "]"
                    continue
                found, end = None, 0
                with contextlib.suppress(ValueError, RecursionError):
                    _, end = scan(text, at)
                    found = BETWEEN.match(text, end)
                if found is not None:
                    yield text[at:end].encode("utf-8", "surrogateescape")
                    at, border, number = found.end(), found[0][-1], number + 1
                elif not is_whole and len(text) - at <= LONGEST_LINE:
                    more()
                elif text.rstrip().endswith("]") or not is_whole:
                    raise DataError(
                        f"{path}:{number}: not a JSON object, or one of more than {LONGEST_LINE:,} "
                        f"characters, in an array, so what follows cannot be read: "
                        f"{text[at : at + 60]!r}"
                    )
                else:
                    raise DataError(f"{path} is truncated: its JSON array has no end")
