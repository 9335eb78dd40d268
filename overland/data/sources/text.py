"""Text files, compressed or not: plain text, where a file is a document; CSV, where a column of
each row holds one; and folders that mix these with JSON lines (`jsonl.py`)."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from overland.data.sources.columns import WHOLE, Column, ColumnFiles, column_name
from overland.data.sources.compression import bare_suffix, decode, open_bytes, read_whole, reading
from overland.data.sources.jsonl import BOM, JSON_SUFFIXES, LONGEST_LINE, LineFiles
from overland.data.sources.source import Bad, Document
from overland.errors import DataError

TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py", ".tex"}
CSV_SUFFIXES = {".csv", ".tsv"}


class CsvRows(ColumnFiles):
    """CSV and TSV: a row is a record of texts, and the first one names the columns. A chunk is a
    whole file: a quoted value may contain line breaks, so the start of a row can only be found by
    reading from the top."""

    format = "csv"

    def __init__(
        self, root: Path, files: list[str], column: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(root, files, skip_bad)
        for file in self.files:
            columns = {name: Column("string", (name,), "text") for name in header(root / file)}
            examples = lambda file=file: dict(_first_row(root / file))
            self.choose(root / file, column, columns, examples)

    def read(self, chunk: str) -> Iterator[Document]:
        yield from read_csv(self, self.root / chunk)


class TextFolder(LineFiles):
    """Text files, and with them JSON lines and CSV, whose documents are in the column `text`."""

    format = "text"

    def __init__(
        self, root: Path, files: list[str], column: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(root, files, skip_bad)
        if column == WHOLE:
            raise DataError(
                f"{root} is text, or mixes formats: records must all be in one format, which can "
                "be JSON lines, CSV, parquet, Arrow or MDS"
            )
        if column not in (None, "text"):
            if all(bare_suffix(Path(file)) in TEXT_SUFFIXES for file in files):
                raise DataError(
                    f"{root} is plain text: it has no columns, so there is no {column!r}"
                )
            self.column, self.steps = column, (column,)

    def num_documents(self, chunk: str) -> int | None:
        return 1 if bare_suffix(self.root / self.files_of(chunk)[0]) in TEXT_SUFFIXES else None

    def read(self, chunk: str) -> Iterator[Document]:
        path = self.root / self.files_of(chunk)[0]
        if bare_suffix(path) in JSON_SUFFIXES:
            yield from super().read(chunk)
        elif bare_suffix(path) in CSV_SUFFIXES:
            yield from read_csv(self, path)
        else:
            with reading(path):
                document = decode(read_whole(path), path, self.bad)
            if document is not None:
                yield document


def header(path: Path) -> list[str]:
    """Returns the names of a CSV file's columns."""
    _, row = next(rows_of(path, lambda message: None), (1, []))
    names = [name.strip() for name in row]
    if not any(names):
        raise DataError(f"{path} is empty: it has no header with the names of its columns")
    return names


def _first_row(path: Path) -> Iterator[tuple[str, str]]:
    rows = rows_of(path, lambda message: None)
    yield from zip(next(rows)[1], next(rows, (1, []))[1], strict=False)


def read_csv(files: ColumnFiles, path: Path) -> Iterator[Document]:
    """Yields the documents of one of the files, whose column, or each of them, must be clear."""
    names = header(path)
    columns = names if files.kind == "records" else [column_name(files.steps)]
    for name in columns:
        if name and names.count(name) > 1:
            raise DataError(
                f"{path}: its header names the column {name!r} twice, so it is not clear which one "
                "is meant: rename one of them"
            )
    rows = rows_of(path, files.bad)
    next(rows)
    for line, row in rows:
        where = f"{path}:{line}"
        if len(row) != len(names):
            files.bad(f"{where}: {len(row):,} values, but the header names {len(names):,} columns")
            continue
        record = dict(zip(names, row, strict=True))
        record = {name: record[name] for name in columns}
        try:
            for name in record:
                record[name].encode()
        except UnicodeEncodeError:
            files.bad(f"{where}: {name} is not UTF-8 text")
            continue
        yield from files.documents(record, where)


def rows_of(path: Path, bad: Bad) -> Iterator[tuple[int, list[str]]]:
    """Yields each row that is not blank, with the number of its last line."""
    csv.field_size_limit(LONGEST_LINE)  # the library's own is 131,072
    begins = num_bytes = 0

    def lines(file: IO[bytes]) -> Iterator[str]:
        nonlocal num_bytes
        while line := file.readline(LONGEST_LINE + 1):
            num_bytes += len(line)
            if num_bytes > LONGEST_LINE:  # as after a quote that is never closed
                raise DataError(
                    f"{path}:{begins}: a row of more than {LONGEST_LINE:,} bytes; look for a quote "
                    "that is opened and never closed, or split the document"
                )
            # Invalid UTF-8 spoils only the value that contains it, not the file.
            text = line.decode("utf-8", "surrogateescape")
            yield text if reader.line_num else text.removeprefix(BOM)

    with reading(path), open_bytes(path) as file:
        is_tabbed = bare_suffix(path) == ".tsv"
        reader = csv.reader(lines(file), delimiter="\t" if is_tabbed else ",", strict=True)
        while True:
            begins, num_bytes = reader.line_num + 1, 0
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if "unexpected end of data" in str(error):
                    raise DataError(
                        f"{path}:{begins}: a quote is opened and never closed"
                    ) from None
                bad(f"{path}:{reader.line_num}: not a valid CSV row: {error}")
                continue
            if row:
                yield reader.line_num, row
