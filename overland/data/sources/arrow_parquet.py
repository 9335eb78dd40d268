"""Parquet and Arrow files: tables that pyarrow reads, one group of rows at a time.

A chunk of a Parquet file is a row group. A chunk of an Arrow IPC file is a record batch; an Arrow
stream, the format in which `datasets` keeps `save_to_disk` folders and its cache, is one chunk.

Arrow trusts the lengths and offsets in a file and reads wherever they point, so everything is
validated before it is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overland.data.sources.columns import (
    Column,
    ColumnFiles,
    Place,
    Step,
    column_name,
    joined,
    values_at,
)
from overland.data.sources.compression import decode
from overland.data.sources.source import Document, Kind, Located, split_part, token_ids
from overland.errors import DataError
from overland.plugins import need

EXAMPLE_ROWS = 4
FILE_MAGIC = b"ARROW1"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
# Rows decoded at once. Through a dictionary, a file of a kilobyte can repeat a text of megabytes in
# every row, and larger batches would save only a microsecond per row.
BATCH_ROWS = 64
# The type of the same bytes, which need not be UTF-8.
BINARY = {"string": "binary", "large_string": "large_binary", "string_view": "binary_view"}


class _Table(ColumnFiles):
    """Files of columns; the number of rows in each group is known once a file is opened."""

    def __init__(
        self, root: Path, files: list[str], column: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(root, files, skip_bad)
        self._rows: dict[str, list[int] | None] = {}
        for file in self.files:
            path = root / file
            with _opened(path, self.format) as table:
                self._rows[file] = table.rows
                columns = _columns_of(table.schema, path)
                self.choose(path, column, columns, partial(_examples_of, table, columns))
        self.num_parts = {file: len(rows) for file, rows in self._rows.items() if rows is not None}
        if all(rows is not None and not sum(rows) for rows in self._rows.values()):
            raise DataError(f"{root / files[0]} is empty: it has no rows")

    def num_documents(self, chunk: str) -> int | None:
        file, group = split_part(chunk)
        rows = self._rows[file]
        return None if rows is None or None in self.steps else rows[group or 0]

    def read(self, chunk: str) -> Iterator[Document]:
        file, group = split_part(chunk)
        path = self.root / file
        first = sum((self._rows[file] or [])[: group or 0])
        with _opened(path, self.format) as table:
            for array in table.arrays(group or 0, self.steps):
                found = self._documents(array, path, first)
                if self.joins:
                    for _, of_row in itertools.groupby(found, key=itemgetter(0)):
                        yield joined(document for _, document in of_row)
                else:
                    yield from (document for _, document in found)
                first += len(array)

    def _documents(self, array: Any, path: Path, first: int) -> Iterator[tuple[int, Document]]:
        """Yields the documents in an array of rows, each with the number of its row; `first` is the
        number of the first row."""
        array.validate()
        if self.kind == "records":
            array.validate(full=True)
            for number, row in enumerate(array, start=first):
                yield number, Located(_without_nulls(row.as_py()), f"{path}: row {number}")
            return
        rows = np.arange(first, first + len(array))
        for step in self.steps[1:]:
            array, rows = self._into(array, step, rows, path)
        values = _bytes_in(array, path) if self.kind == "text" else _lists_in(array)
        for row, value in zip(rows.tolist(), values, strict=True):
            where = f"{path}: row {row}"
            document: Document | None = None
            if value is None:
                self.bad(f"{where}: the document is null")
            elif self.kind == "text":
                document = decode(value, where, self.bad)
            else:
                document = token_ids(value.to_numpy(zero_copy_only=False), where, self.bad)
            if document is not None:
                yield row, document

    def _into(
        self, array: Any, step: Step, rows: npt.NDArray[np.int64], path: Path
    ) -> tuple[Any, npt.NDArray[np.int64]]:
        """Takes one step into structs or lists; `rows` is the row number of each value."""
        compute = need("pyarrow.compute", str(path))
        if step is not None:
            return compute.struct_field(array, [step]), rows
        if hasattr(array, "offsets"):  # a list of fixed size has none
            offsets = array.offsets.to_numpy(zero_copy_only=False)
            if (offsets[1:] < offsets[:-1]).any():
                raise DataError(f"{path} is damaged: a list in it ends before it begins")
        if array.null_count:
            for row in rows[array.is_null().to_numpy(zero_copy_only=False)].tolist():
                self.bad(f"{path}: row {row}: the list of documents is null")
            valid = array.is_valid()
            array, rows = array.filter(valid), rows[valid.to_numpy(zero_copy_only=False)]
        parents = compute.list_parent_indices(array).to_numpy(zero_copy_only=False)
        return compute.list_flatten(array), rows[parents]


class Parquet(_Table):
    format = "parquet"


class Arrow(_Table):
    format = "arrow"


class _ParquetFile:
    """Row groups, read in small batches; the footer has the number of rows per group."""

    def __init__(self, path: Path) -> None:
        module = need("pyarrow.parquet", f"{path}: parquet")
        self._file = module.ParquetFile(path, page_checksum_verification=True)
        self.close = self._file.close
        footer = self._file.metadata
        self.schema = self._file.schema_arrow
        self.rows: list[int] | None = [
            footer.row_group(group).num_rows for group in range(footer.num_row_groups)
        ]

    def arrays(self, group: int, steps: Place) -> Iterator[Any]:
        """Yields the column that holds the documents, or whole rows, a few rows at a time."""
        columns = self._stored(steps) if steps else None
        for batch in self._file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns):
            yield batch.column(0) if steps else batch.to_struct_array()

    def _stored(self, steps: Place) -> list[str]:
        """Returns the file's own names for the values at a place, so that only the needed part of a
        nested column is read."""
        first, last = str(steps[0]), steps[-1]
        stored = (self._file.schema.column(i).path for i in range(len(self._file.schema)))
        inside = [one for one in stored if one.startswith(f"{first}.") and one.endswith(f".{last}")]
        return inside if len(steps) > 1 and last is not None and inside else [first]


class _ArrowFile:
    """The record batches of a memory-mapped file, which lists them, or of a stream."""

    def __init__(self, path: Path) -> None:
        pa = need("pyarrow", f"{path}: arrow")
        need("pyarrow.ipc", f"{path}: arrow")
        with path.open("rb") as file:
            is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
            file.seek(-min(len(END_OF_STREAM), path.stat().st_size), 2)
            self._is_whole = is_file or file.read() == END_OF_STREAM
        self._path, data = path, pa.memory_map(str(path))
        self.close = data.close
        self._reader = pa.ipc.open_file(data) if is_file else pa.ipc.open_stream(data)
        self.schema, self.rows = self._reader.schema, None
        if is_file:  # reads only the batches' headers
            batches = map(self._batch, range(self._reader.num_record_batches))
            self.rows = [batch.num_rows for batch in batches]

    def arrays(self, group: int, steps: Place) -> Iterator[Any]:
        """Yields the column that holds the documents, or whole rows, a few rows at a time."""
        for batch in self._batches() if self.rows is None else [self._batch(group)]:
            if steps:
                yield batch.column(batch.schema.get_field_index(steps[0]))
                continue
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS).to_struct_array()

    def _batch(self, group: int) -> Any:
        batch = self._reader.get_batch(group)
        batch.validate()  # as many values as rows, all within the file's bytes
        return batch

    def _batches(self) -> Iterator[Any]:
        yield from self._reader
        # pyarrow does not notice a stream that ends between two batches.
        if not self._is_whole:
            raise DataError(f"{self._path} is truncated: its Arrow stream has no end marker")


@contextmanager
def _opened(path: Path, format: str) -> Iterator[_ParquetFile | _ArrowFile]:
    """Opens a table, and explains why it cannot be read."""
    pa = need("pyarrow", f"{path}: {format}")
    try:
        table = _ParquetFile(path) if format == "parquet" else _ArrowFile(path)
        try:
            yield table
        finally:
            table.close()
    except (OSError, UnicodeDecodeError, MemoryError, pa.ArrowException) as error:
        reason = " ".join(str(error).split()) or "not enough memory for the size it claims"
        raise DataError(f"{path} cannot be read, or is truncated or damaged: {reason}") from None


def _columns_of(schema: Any, path: Path) -> dict[str, Column]:
    """Returns every column by name; structs and lists are expanded into what they contain."""
    columns: dict[str, Column] = {}
    if len(set(schema.names)) < len(schema.names):
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise DataError(f"{path} has the column {twice!r} twice: rename one of them")
    for field in schema:
        for place, type in _leaves((field.name,), field.type):
            kind = _kind_of(type)
            # Bytes may be text; in a column named for token ids they are ids of unknown type.
            if place[-1] in ("tokens", "input_ids") and str(type) in BINARY.values():
                kind = None
            columns.setdefault(column_name(place), Column(str(type), place, kind))
    return columns


def _leaves(place: Place, type: Any) -> Iterator[tuple[Place, Any]]:
    if need("pyarrow", "arrow").types.is_struct(type) and type.num_fields:
        for field in type:
            yield from _leaves((*place, field.name), field.type)
    elif _is_list(type) and _kind_of(type) is None:
        yield from _leaves((*place, None), type.value_type)
    else:
        yield place, type


def _kind_of(type: Any) -> Kind | None:
    is_a = need("pyarrow", "arrow").types
    if _is_list(type):
        return "tokens" if is_a.is_integer(type.value_type) else None
    name = str(type.value_type if is_a.is_dictionary(type) else type)
    return "text" if name in (*BINARY, *BINARY.values()) else None


def _is_list(type: Any) -> bool:
    is_a = need("pyarrow", "arrow").types
    return bool(is_a.is_list(type) or is_a.is_large_list(type) or is_a.is_fixed_size_list(type))


def _examples_of(table: _ParquetFile | _ArrowFile, columns: Mapping[str, Column]) -> dict[str, Any]:
    """Returns the first value of each column that is not null, from the first rows."""
    groups = range(1 if table.rows is None else len(table.rows))
    arrays = (array for group in groups for array in table.arrays(group, ()))
    found: dict[str, Any] = {}
    for array in itertools.islice(arrays, 1):
        array.validate(full=True)
        rows = array.slice(0, EXAMPLE_ROWS).to_pylist()
        for name, column in columns.items():
            values = (value for row in rows for value in values_at(row, column.place))
            found[name] = next((value for value in values if value is not None), None)
    return found


def _without_nulls(value: Any) -> Any:
    """Drops null fields: a table gives every struct all fields, with null for missing ones. Null
    content stays: chat templates ask for it in calls of tools."""
    if isinstance(value, dict):
        kept = {k: item for k, item in value.items() if item is not None or k == "content"}
        return {key: _without_nulls(item) for key, item in kept.items()}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _bytes_in(array: Any, path: Path) -> Iterator[bytes | None]:
    """Yields each text as bytes, so that invalid UTF-8 spoils only its own document. Dictionary
    values are expanded row by row, since a small file can repeat a long text many times."""
    if not need("pyarrow", str(path)).types.is_dictionary(array.type):
        return (value.as_py() for value in _as_binary(array))
    words = _as_binary(array.dictionary)
    limits = need("pyarrow.compute", str(path)).min_max(array.indices).as_py()
    if limits["min"] is not None and not 0 <= limits["min"] <= limits["max"] < len(words):
        raise DataError(
            f"{path} is damaged: an index is outside its dictionary of {len(words):,} values"
        )
    return (None if i is None else words[i].as_py() for i in array.indices.to_pylist())


def _as_binary(array: Any) -> Any:
    name = BINARY.get(str(array.type))
    array = array if name is None else array.view(getattr(need("pyarrow", "arrow"), name)())
    array.validate(full=True)
    return array


def _lists_in(array: Any) -> Iterator[Any]:
    array.validate(full=True)
    return (row.values if row.is_valid else None for row in array)
