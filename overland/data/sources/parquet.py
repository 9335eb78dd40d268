"""Parquet: a chunk is a row group, read front to back in small batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from overland.data.sources.arrow_values import (
    check_column,
    columns_of,
    documents,
    examples_of,
    reading_arrow,
)
from overland.data.sources.columns import Column, Place, choose_column
from overland.data.sources.source import Document, FileSource, part_of, split_part
from overland.errors import DataError
from overland.packages import need

# Decoded at once. By its dictionary, a file of a kilobyte can repeat a text of megabytes in every
# row; more rows would save a microsecond for each.
BATCH_ROWS = 64
EXAMPLE_ROWS = 4


class Parquet(FileSource):
    """Rows per row group are known from the files' footers, which are read once, on opening."""

    format = "parquet"

    def __init__(
        self, root: Path, files: list[str], column: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(root, files, skip_bad)
        self._rows: dict[str, list[int]] = {}
        for file in self.files:
            with reading_arrow(root / file), _open(root / file) as parquet:
                schema, footer = parquet.schema_arrow, parquet.metadata
                columns = columns_of(schema)
                groups = range(footer.num_row_groups)
                self._rows[file] = [footer.row_group(group).num_rows for group in groups]
            if self.column is None:
                self.columns = {name: one.type for name, one in columns.items()}
                examples = partial(_examples, root / file, columns)
                self.column = choose_column(root / file, column, columns, examples)
                chosen = columns[self.column]
                self.kind, self._path = chosen.kind or "text", chosen.place
            check_column(root / file, schema, self.column, chosen)
        if not any(map(sum, self._rows.values())):
            raise DataError(f"{root / files[0]} is empty: it has no rows")

    def chunks(self) -> list[str]:
        return [
            part_of(file, group) for file, rows in self._rows.items() for group in range(len(rows))
        ]

    def num_documents(self, chunk: str) -> int | None:
        file, group = split_part(chunk)
        return None if None in self._path else self._rows[file][group or 0]

    def read(self, chunk: str) -> Iterator[Document]:
        file, group = split_part(chunk)
        path = self.root / file
        first = sum(self._rows[file][: group or 0])
        with reading_arrow(path), _open(path) as parquet:
            columns = _stored(parquet, self._path)
            for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns):
                array = batch.column(0)
                yield from documents(array, self._path, self.kind, path, first, self.bad)
                first += batch.num_rows


def _open(path: Path) -> Any:
    module = need("pyarrow.parquet", f"{path}: parquet")
    with reading_arrow(path):
        return module.ParquetFile(path, page_checksum_verification=True)


def _stored(parquet: Any, place: Place) -> list[str]:
    """What the file calls the values at a place: of a nested column, not all of it is read."""
    first, last = str(place[0]), place[-1]
    stored = (parquet.schema.column(i).path for i in range(len(parquet.schema)))
    inside = [one for one in stored if one.startswith(f"{first}.") and one.endswith(f".{last}")]
    return inside if len(place) > 1 and last is not None and inside else [first]


def _examples(path: Path, columns: Mapping[str, Column]) -> dict[str, Any]:
    with reading_arrow(path), _open(path) as parquet:
        batch = next(parquet.iter_batches(EXAMPLE_ROWS), None)
        return {} if batch is None else examples_of(batch, columns)
