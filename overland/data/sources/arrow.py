"""Arrow IPC: files, whose record batches are chunks, and streams, which are one chunk each.

`datasets` keeps its tables as streams, in `save_to_disk` folders and in its cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from overland.data.sources.columns import Column, choose_column
from overland.data.sources.compression import reading
from overland.data.sources.source import Document, FileSource, part_of, split_part
from overland.errors import DataError
from overland.packages import need

EXAMPLE_ROWS = 4
FILE_MAGIC = b"ARROW1"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class Arrow(FileSource):
    format = "arrow"

    def __init__(
        self, root: Path, files: list[str], column: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(root, files, skip_bad)
        self._rows: dict[str, list[int] | None] = {}
        for file in self.files:
            with _open(root / file) as (reader, is_file):
                schema = reader.schema
                columns = columns_of(schema)
                self._rows[file] = _rows_per_batch(reader) if is_file else None
            if self.column is None:
                self.columns = {name: one.type for name, one in columns.items()}
                examples = partial(_examples, root / file, columns)
                self.column = choose_column(root / file, column, columns, examples)
                chosen = columns[self.column]
                self.kind, self._path = chosen.kind or "text", chosen.place
            check_column(root / file, schema, self.column, chosen)
        if all(rows is not None and not sum(rows) for rows in self._rows.values()):
            raise DataError(f"{root / files[0]} is empty: it has no rows")

    def chunks(self) -> list[str]:
        return [
            chunk
            for file, rows in self._rows.items()
            for chunk in ([file] if rows is None else [part_of(file, i) for i in range(len(rows))])
        ]

    def num_documents(self, chunk: str) -> int | None:
        file, group = split_part(chunk)
        rows = self._rows[file]
        return None if rows is None or None in self._path else rows[group or 0]

    def read(self, chunk: str) -> Iterator[Document]:
        file, group = split_part(chunk)
        path, rows = self.root / file, self._rows[file]
        first = sum((rows or [])[: group or 0])
        with _open(path) as (reader, is_file):
            for batch in [_batch(reader, group)] if is_file else _batches(reader, path):
                array = batch.column(batch.schema.get_field_index(self._path[0]))
                yield from documents(array, self._path, self.kind, path, first, self.bad)
                first += batch.num_rows


@contextmanager
def _open(path: Path) -> Iterator[tuple[Any, bool]]:
    """A reader, and whether it is of a file (that knows its batches) or of a stream."""
    pa = need("pyarrow", f"{path}: arrow")
    need("pyarrow.ipc", f"{path}: arrow")
    with reading(path), path.open("rb") as file:
        is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
    with reading_arrow(path), pa.memory_map(str(path)) as data:
        yield (pa.ipc.open_file(data) if is_file else pa.ipc.open_stream(data)), is_file


def _examples(path: Path, columns: Mapping[str, Column]) -> dict[str, Any]:
    with _open(path) as (reader, is_file):
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        batch = next(iter(batches), None)
        if batch is None:
            return {}
        batch.validate(full=True)
        return examples_of(batch.slice(0, EXAMPLE_ROWS), columns)


def _rows_per_batch(reader: Any) -> list[int]:
    """Of a mapped file this touches the heads of the batches alone."""
    return [_batch(reader, group).num_rows for group in range(reader.num_record_batches)]


def _batch(reader: Any, group: int | None) -> Any:
    batch = reader.get_batch(group)
    batch.validate()  # as many values as rows, within the bytes that there are
    return batch


def _batches(reader: Any, path: Path) -> Iterator[Any]:
    yield from reader
    # A stream that ends between two batches is read without complaint; its end mark tells.
    with reading(path), path.open("rb") as file:
        file.seek(-len(END_OF_STREAM), 2)
        if file.read() != END_OF_STREAM:
            raise DataError(f"{path} is cut short: an Arrow stream without its end mark")
