"""CSV and TSV with a header: a row is a record, and one of the columns holds the documents."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from overland.data.sources.columns import WHOLE, Column, choose_column, no_column
from overland.data.sources.compression import bare_suffix, open_bytes, reading
from overland.data.sources.jsonl import LONGEST_LINE
from overland.data.sources.source import Bad, Document, FileSource, Located
from overland.errors import DataError

CSV_SUFFIXES = {".csv", ".tsv"}
BOM = "\ufeff"


class CsvRows(FileSource):
    """Text only. A chunk is a whole file: a quoted value may contain line breaks, so the start of a
    row can only be found by reading from the top."""

    format = "csv"

    def __init__(
        self, root: Path, files: list[str], column: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(root, files, skip_bad)
        for file in self.files:
            columns = {name: Column("string", (name,), "text") for name in header(root / file)}
            if self.column is None:
                self.columns = dict.fromkeys(columns, "string")
                examples = lambda file=file: dict(_first(root / file))
                self.column = choose_column(root / file, column, columns, examples)
                if self.column == WHOLE:
                    self.kind = "records"
            elif self.column == WHOLE and list(columns) != list(self.columns):
                raise DataError(f"{root / file} has different columns than {root / self.files[0]}")
            elif self.column == WHOLE:
                continue
            elif self.column not in columns:
                raise no_column(root / file, self.column, columns, ", ".join(columns))

    def read(self, chunk: str) -> Iterator[Document]:
        if self.kind == "records":
            return read_records(self.root / chunk, self.bad)
        return read_rows(self.root / chunk, self.column or "text", self.bad)


def header(path: Path) -> list[str]:
    """Returns the names of the columns."""
    rows = _rows(path, lambda message: None)
    names = [name.strip() for name in next(rows, (1, []))[1]]
    if not any(names):
        raise DataError(f"{path} is empty: it has no header with the names of its columns")
    return names


def read_rows(path: Path, column: str, bad: Bad) -> Iterator[str]:
    return (record[column] for record in read_records(path, bad, [column]))


def read_records(
    path: Path, bad: Bad, columns: Sequence[str] | None = None
) -> Iterator[dict[str, str]]:
    """Yields each row as a dict of all columns, or of the given ones."""
    names = header(path)
    for name in columns or names:
        if name and names.count(name) > 1:
            raise DataError(
                f"{path}: its header names the column {name!r} twice, so it is not clear which one "
                "is meant: rename one of them"
            )
    rows = _rows(path, bad)
    next(rows)
    for line, row in rows:
        where = f"{path}:{line}"
        if len(row) != len(names):
            bad(f"{where}: {len(row):,} values, but the header names {len(names):,} columns")
            continue
        record = dict(zip(names, row, strict=True))
        record = {name: record[name] for name in columns or names}
        try:
            for name in record:
                record[name].encode()
        except UnicodeEncodeError:
            bad(f"{where}: {name} is not UTF-8 text")
            continue
        yield Located(record, where)


def _first(path: Path) -> Iterator[tuple[str, str]]:
    rows = _rows(path, lambda message: None)
    yield from zip(next(rows)[1], next(rows, (1, []))[1], strict=False)


def _rows(path: Path, bad: Bad) -> Iterator[tuple[int, list[str]]]:
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
