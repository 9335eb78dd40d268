"""JSON lines: an object per line, of which one value is the document."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from overland.data.sources.columns import Place, choose_column, did_you_mean, name_of
from overland.data.sources.compression import times_smaller
from overland.data.sources.lines import (
    LONGEST_LINE,
    Part,
    line_chunks,
    lines_before,
    num_bytes,
    read_part,
    split_lines,
)
from overland.data.sources.records import Sample, kind_of, values_at
from overland.data.sources.source import Bad, Document, FileSource, Kind

JSON_SUFFIXES = {".jsonl", ".json", ".ndjson"}
# Looked at to settle the column: of all files together, or a line of each file.
SAMPLE_RECORDS = 1000
SAMPLE_BYTES = 4 << 20
SAMPLE_FILES = 16
NO_ARRAY = "; one object per line is read, no array"


class JsonLines(FileSource):
    """One object per line; its documents are one of the object's values."""

    format = "jsonl"

    def __init__(
        self, root: Path, files: list[str], column: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(root, files, skip_bad)
        sample = sample_lines(root, files)
        columns = sample.columns(column)
        self.columns = {name: column.type for name, column in columns.items()}
        # Without a single good line there is nothing to choose from; reading will say why.
        if columns:
            self.column = choose_column(self.place, column, columns, lambda: sample.examples)
        else:
            self.column = column
        chosen = columns.get(self.column or "")
        self.kind = (chosen.kind if chosen else None) or "text"
        self._path = chosen.place if chosen else (self.column or "text",)
        self._line_bytes = sample.num_bytes / max(sample.num_lines, 1)

    def chunks(self) -> list[str]:
        return list(line_chunks(self.root, self.files, self.rules))

    def files_of(self, chunk: str) -> list[str]:
        return [split_lines(chunk, self.names)[0]]

    def num_bytes(self, chunk: str) -> int | None:
        return num_bytes(chunk, self.names)

    def about_documents(self) -> int | None:
        if not self._line_bytes:
            return None
        sizes = ((self.root / file).stat().st_size * times_smaller(file) for file in self.files)
        return round(sum(sizes) / self._line_bytes)

    def read(self, chunk: str) -> Iterator[Document]:
        file, part = split_lines(chunk, self.names)
        return read_lines(self.root / file, part, self._path, self.kind, self.bad)


def read_lines(path: Path, part: Part, column: Place, kind: Kind, bad: Bad) -> Iterator[Document]:
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
        for value in values_at(record, column):
            try:
                document = _document(value, column, kind, record, text)
            except _Unusable as error:
                bad(f"{where()}: {error}")
            else:
                yield document


class _Unusable(Exception):
    pass


def _parse(line: bytes) -> tuple[object, str]:
    """What a line says, and the line itself."""
    try:
        text = line.decode("utf-8")
        return json.loads(text), text
    except UnicodeDecodeError as error:
        raise _Unusable(
            f"expected UTF-8 text, got {error.reason} at byte {error.start:,}"
        ) from None
    except json.JSONDecodeError as error:
        hint = NO_ARRAY if text.strip() == "[" else ""
        raise _Unusable(f"not a JSON object: {error.msg}{hint}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits; a deep nest
        raise _Unusable("not a JSON object that can be read") from None


def _document(value: object, column: Place, kind: Kind, record: object, line: str) -> Document:
    if kind == "tokens" and isinstance(value, list) and kind_of(value) == "tokens":
        if value and not 0 <= min(value) <= max(value) < 1 << 63:
            wrong = min(value) if min(value) < 0 else max(value)
            raise _Unusable(f"{name_of(column)} has {wrong:,}, which is no token id")
        return np.asarray(value, dtype=np.int64)
    if kind == "tokens" or not isinstance(value, str):
        what = f'"{name_of(column)}"' + (" of token ids" if kind == "tokens" else "")
        near = NO_ARRAY if isinstance(record, list) else ""
        if isinstance(record, dict) and column[0] not in record:
            near = did_you_mean(str(column[0]), record)
        raise _Unusable(f"expected an object with a {what}, got {line.strip()[:60]!r}{near}")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can say half of a surrogate pair, which is no text
        raise _Unusable(f"{name_of(column)} has half of a surrogate pair, no UTF-8 text") from None
    return value


def sample_lines(root: Path, files: Sequence[str]) -> Sample:
    """Some records of some files, spread over them, from the beginning of each."""
    sample = Sample()
    chosen = [files[len(files) * i // SAMPLE_FILES] for i in range(SAMPLE_FILES)]
    chosen = list(dict.fromkeys(chosen))
    for file in chosen:
        num_bytes = 0
        for number, (line, _, _) in enumerate(read_part(root / file, Part()), start=1):
            with contextlib.suppress(ValueError, RecursionError):
                if len(line) <= LONGEST_LINE:
                    sample.add(json.loads(line))
            num_bytes += len(line)
            sample.num_lines += 1
            sample.num_bytes += len(line)
            if number * len(chosen) >= SAMPLE_RECORDS or num_bytes * len(chosen) >= SAMPLE_BYTES:
                break
    return sample
