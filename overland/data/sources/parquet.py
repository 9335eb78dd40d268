"""Parquet: a chunk is a row group, read front to back in small batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from overland.data.errors import DataError
from overland.data.sources.arrow_values import (
    check_column,
    documents,
    kinds_of,
    reading_arrow,
    types_of,
)
from overland.data.sources.columns import choose_column
from overland.data.sources.needs import need
from overland.data.sources.source import Document, FileSource, part_of, split_part

BATCH_ROWS = 1024


class Parquet(FileSource):
    """Rows per row group are known from the files' footers, which are read once, on opening."""

    format = "parquet"

    def __init__(
        self, root: Path, files: list[str], column: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(root, files, skip_bad)
        self._rows: dict[str, list[int]] = {}
        for file in self.files:
            with _open(root / file) as parquet:
                schema, footer = parquet.schema_arrow, parquet.metadata
                groups = range(footer.num_row_groups)
                self._rows[file] = [footer.row_group(group).num_rows for group in groups]
            if self.column is None:
                self.columns, kinds = types_of(schema), kinds_of(schema)
                self.column = choose_column(root / file, column, self.columns, kinds)
                self.kind = kinds[self.column]
            check_column(root / file, schema, self.column, self.kind)
        if not any(map(sum, self._rows.values())):
            raise DataError(f"{root / files[0]} is empty: it has no rows")

    def chunks(self) -> list[str]:
        return [
            part_of(file, group) for file, rows in self._rows.items() for group in range(len(rows))
        ]

    def num_documents(self, chunk: str) -> int:
        file, group = split_part(chunk)
        return self._rows[file][group or 0]

    def read(self, chunk: str) -> Iterator[Document]:
        file, group = split_part(chunk)
        path = self.root / file
        first = sum(self._rows[file][: group or 0])
        with reading_arrow(path), _open(path) as parquet:
            batches = parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=[self.column])
            for batch in batches:
                yield from documents(batch.column(0), self.kind, path, first, self.bad)
                first += batch.num_rows


def _open(path: Path) -> Any:
    module = need("pyarrow.parquet", f"{path}: parquet")
    with reading_arrow(path):
        return module.ParquetFile(path, page_checksum_verification=True)
