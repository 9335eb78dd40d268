"""CSV and TSV with a header: a row is a record, and its documents are one of the columns."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from overland.data.errors import DataError
from overland.data.sources.columns import Column, choose_column, did_you_mean
from overland.data.sources.compression import bare_suffix, open_bytes, reading
from overland.data.sources.source import Bad, FileSource

CSV_SUFFIXES = {".csv", ".tsv"}
FIELD_CHARACTERS = 1 << 30  # the longest document; the library's own limit is 131,072
BOM = "\ufeff"


class CsvRows(FileSource):
    """Text only. A chunk is a file: a quoted value may hold line breaks, so that nothing but
    reading from the top tells where a row begins."""

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
            elif self.column not in columns:
                near = did_you_mean(self.column, columns)
                has = ", ".join(columns)
                raise DataError(
                    f"{root / file} has no column {self.column!r}{near}; its columns: {has}"
                )

    def read(self, chunk: str) -> Iterator[str]:
        return read_rows(self.root / chunk, self.column or "text", self.bad)


def header(path: Path) -> list[str]:
    """The names of the columns."""
    rows = _rows(path, lambda message: None)
    names = [name.strip() for name in next(rows, (1, []))[1]]
    if not any(names):
        raise DataError(f"{path} is empty: it has no header that names its columns")
    return names


def read_rows(path: Path, column: str, bad: Bad) -> Iterator[str]:
    names = header(path)
    place = names.index(column)
    rows = _rows(path, bad)
    next(rows)
    for line, row in rows:
        where = f"{path}:{line}"
        if len(row) != len(names):
            bad(f"{where}: {len(row):,} values where the header names {len(names):,}")
            continue
        try:
            row[place].encode()
        except UnicodeEncodeError:
            bad(f"{where}: {column} is no UTF-8 text")
            continue
        yield row[place]


def _first(path: Path) -> Iterator[tuple[str, str]]:
    rows = _rows(path, lambda message: None)
    yield from zip(next(rows)[1], next(rows, (1, []))[1], strict=False)


def _rows(path: Path, bad: Bad) -> Iterator[tuple[int, list[str]]]:
    """Each row that is not blank, and the line that it ends on."""
    csv.field_size_limit(FIELD_CHARACTERS)
    with reading(path), open_bytes(path) as file:
        # Bytes that are no UTF-8 spoil the value they are in, not the file.
        lines = (line.decode("utf-8", "surrogateescape") for line in file)
        lines = (
            line.removeprefix(BOM) if number == 0 else line for number, line in enumerate(lines)
        )
        is_tabbed = bare_suffix(path) == ".tsv"
        reader = csv.reader(lines, delimiter="\t" if is_tabbed else ",", strict=True)
        while True:
            begins = reader.line_num + 1
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if "unexpected end of data" in str(error):
                    raise DataError(
                        f"{path}:{begins}: a quote is opened and never closed"
                    ) from None
                bad(f"{path}:{reader.line_num}: not a row of CSV: {error}")
                continue
            if row:
                yield reader.line_num, row
