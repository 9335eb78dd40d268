"""Parquet and Arrow files: tables that pyarrow reads, one group of rows at a time.

A chunk of a Parquet file is a row group. A chunk of an Arrow IPC file is a record batch; an Arrow
stream, the format in which `datasets` keeps `save_to_disk` folders and its cache, is one chunk.
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
    RECORD,
    WHOLE,
    Column,
    Place,
    Step,
    check_joinable,
    choose_column,
    column_name,
    joined,
    no_column,
    split_joined,
    values_at,
)
from overland.data.sources.compression import reading
from overland.data.sources.source import (
    Bad,
    Document,
    FileSource,
    Kind,
    Located,
    decode,
    part_of,
    split_part,
    token_ids,
)
from overland.errors import DataError
from overland.plugins import need

EXAMPLE_ROWS = 4
FILE_MAGIC = b"ARROW1"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
# Rows decoded at once. Through a dictionary, a file of a kilobyte can repeat a text of megabytes in
# every row, and larger batches would save only a microsecond per row.
BATCH_ROWS = 64


class _Table(FileSource):
    """Files of columns; the number of rows in each group is known once a file is opened."""

    def __init__(
        self, root: Path, files: list[str], column: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(root, files, skip_bad)
        self._rows: dict[str, list[int] | None] = {}
        self._joins = column is not None and split_joined(column)[1]
        for file in self.files:
            columns, self._rows[file] = self._look(root / file)
            if self.column is None:
                self.columns = {name: one.type for name, one in columns.items()}
                examples = partial(self._examples, root / file, columns)
                self.column = choose_column(root / file, column, columns, examples)
                chosen = RECORD if self.column == WHOLE else columns[self.column]
                self.kind, self._path = chosen.kind or "text", chosen.place
            if self.column != WHOLE:
                _check_column(root / file, columns, self.column, chosen)
            elif list(columns) != list(self.columns):
                raise DataError(f"{root / file} has different columns than {root / files[0]}")
        if all(rows is not None and not sum(rows) for rows in self._rows.values()):
            raise DataError(f"{root / files[0]} is empty: it has no rows")
        if self._joins:
            check_joinable(self.place, column, self.kind)
            self.column = column

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
        path = self.root / file
        first = sum((self._rows[file] or [])[: group or 0])
        with _reading_arrow(path):
            for array in self._arrays(path, group):
                found = _documents(array, self._path, self.kind, path, first, self.bad)
                if self._joins:
                    for _, of_row in itertools.groupby(found, key=itemgetter(0)):
                        yield joined(str(document) for _, document in of_row)
                else:
                    yield from (document for _, document in found)
                first += len(array)

    def _look(self, path: Path) -> tuple[dict[str, Column], list[int] | None]:
        """Returns a file's columns and the number of rows in each group (None without groups)."""
        raise NotImplementedError

    def _arrays(self, path: Path, group: int | None) -> Iterator[Any]:
        """Yields the column that holds the documents, a few rows at a time."""
        raise NotImplementedError

    @staticmethod
    def _examples(path: Path, columns: Mapping[str, Column]) -> dict[str, Any]:
        """Returns a value of each column, from the first rows."""
        raise NotImplementedError


class Parquet(_Table):
    """Row groups are read in small batches; the footers give the number of rows per group."""

    format = "parquet"

    def _look(self, path: Path) -> tuple[dict[str, Column], list[int]]:
        with _reading_arrow(path), _open_parquet(path) as parquet:
            footer = parquet.metadata
            groups = range(footer.num_row_groups)
            rows = [footer.row_group(group).num_rows for group in groups]
            return _columns_of(parquet.schema_arrow, path), rows

    def _arrays(self, path: Path, group: int | None) -> Iterator[Any]:
        with _open_parquet(path) as parquet:
            columns = _stored(parquet, self._path) if self._path else None
            for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns):
                yield batch.column(0) if self._path else batch.to_struct_array()

    @staticmethod
    def _examples(path: Path, columns: Mapping[str, Column]) -> dict[str, Any]:
        with _reading_arrow(path), _open_parquet(path) as parquet:
            batch = next(parquet.iter_batches(EXAMPLE_ROWS), None)
            return {} if batch is None else _examples_of(batch, columns)


class Arrow(_Table):
    """Arrow IPC: each record batch of a file is a chunk, and each stream is one chunk."""

    format = "arrow"

    def _look(self, path: Path) -> tuple[dict[str, Column], list[int] | None]:
        with _open_arrow(path) as (reader, is_file):
            return _columns_of(reader.schema, path), _rows_per_batch(reader) if is_file else None

    def _arrays(self, path: Path, group: int | None) -> Iterator[Any]:
        with _open_arrow(path) as (reader, is_file):
            for batch in [_batch(reader, group)] if is_file else _batches(reader, path):
                if self._path:
                    yield batch.column(batch.schema.get_field_index(self._path[0]))
                    continue
                for start in range(0, batch.num_rows, BATCH_ROWS):
                    yield batch.slice(start, BATCH_ROWS).to_struct_array()

    @staticmethod
    def _examples(path: Path, columns: Mapping[str, Column]) -> dict[str, Any]:
        with _open_arrow(path) as (reader, is_file):
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            batch = next(iter(batches), None)
            if batch is None:
                return {}
            batch.validate(full=True)
            return _examples_of(batch.slice(0, EXAMPLE_ROWS), columns)


@contextmanager
def _open_arrow(path: Path) -> Iterator[tuple[Any, bool]]:
    """Yields a reader, and whether it reads a file (which lists its batches) or a stream."""
    pa = need("pyarrow", f"{path}: arrow")
    need("pyarrow.ipc", f"{path}: arrow")
    with reading(path), path.open("rb") as file:
        is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
    with _reading_arrow(path), pa.memory_map(str(path)) as data:
        yield (pa.ipc.open_file(data) if is_file else pa.ipc.open_stream(data)), is_file


def _rows_per_batch(reader: Any) -> list[int]:
    """Reads only the batches' headers, since the file is memory-mapped."""
    return [_batch(reader, group).num_rows for group in range(reader.num_record_batches)]


def _batch(reader: Any, group: int | None) -> Any:
    batch = reader.get_batch(group)
    batch.validate()  # as many values as rows, all within the file's bytes
    return batch


def _batches(reader: Any, path: Path) -> Iterator[Any]:
    yield from reader
    # pyarrow does not notice a stream that ends between two batches, so check for the end marker.
    with reading(path), path.open("rb") as file:
        file.seek(-len(END_OF_STREAM), 2)
        if file.read() != END_OF_STREAM:
            raise DataError(f"{path} is truncated: its Arrow stream has no end marker")


def _open_parquet(path: Path) -> Any:
    module = need("pyarrow.parquet", f"{path}: parquet")
    with _reading_arrow(path):
        return module.ParquetFile(path, page_checksum_verification=True)


def _stored(parquet: Any, place: Place) -> list[str]:
    """Returns the file's own names for the values at a place, so that only the needed part of a
    nested column is read."""
    first, last = str(place[0]), place[-1]
    stored = (parquet.schema.column(i).path for i in range(len(parquet.schema)))
    inside = [one for one in stored if one.startswith(f"{first}.") and one.endswith(f".{last}")]
    return inside if len(place) > 1 and last is not None and inside else [first]


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
            if place[-1] in ("tokens", "input_ids") and _is_binary(type):
                kind = None
            columns.setdefault(column_name(place), Column(str(type), place, kind))
    return columns


def _check_column(path: Path, columns: Mapping[str, Column], column: str, like: Column) -> None:
    """Raises an error that names the file if it lacks the column or stores it differently."""
    if column not in columns:
        raise no_column(path, column, columns, ", ".join(columns))
    if columns[column].kind != like.kind:
        type = columns[column].type
        raise DataError(f"{path}: column {column!r} is {type}, but {like.kind} in other files")


def _examples_of(table: Any, columns: Mapping[str, Column]) -> dict[str, Any]:
    """Returns the first value of each column that is not null."""
    rows = table.to_pylist()
    found = {}
    for name, column in columns.items():
        values = (value for row in rows for value in values_at(row, column.place))
        found[name] = next((value for value in values if value is not None), None)
    return found


def _documents(
    array: Any, place: Place, kind: Kind, path: Path, first: int, bad: Bad
) -> Iterator[tuple[int, Document]]:
    """Yields the documents of a column, or of the values at `place` in it, each with the number of
    its row; `first` is the number of the first row.

    Arrow trusts the lengths and offsets in a file and reads wherever they point, so they are
    validated before they are used.
    """
    array.validate()
    if kind == "records":
        array.validate(full=True)
        for number, row in enumerate(array, start=first):
            yield number, Located(_without_nulls(row.as_py()), f"{path}: row {number}")
        return
    rows = np.arange(first, first + len(array))
    for step in place[1:]:
        array, rows = _into(array, step, rows, path, bad)
    values = _bytes_in(array, path) if kind == "text" else _lists_in(array)
    for row, value in zip(rows.tolist(), values, strict=True):
        where = f"{path}: row {row}"
        if value is None:
            bad(f"{where}: the document is null")
            continue
        if kind == "text":
            document: Document | None = decode(value, where, bad)
        else:
            document = token_ids(value.to_numpy(zero_copy_only=False), where, bad)
        if document is not None:
            yield row, document


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
    pa = need("pyarrow", str(path))
    if not pa.types.is_dictionary(array.type):
        array = array.view(_bare(array.type))
        array.validate(full=True)
        return (value.as_py() for value in array)
    words = array.dictionary.view(_bare(array.dictionary.type))
    words.validate(full=True)
    limits = need("pyarrow.compute", str(path)).min_max(array.indices).as_py()
    if limits["min"] is not None and not 0 <= limits["min"] <= limits["max"] < len(words):
        raise DataError(
            f"{path} is damaged: an index is outside its dictionary of {len(words):,} values"
        )
    return (None if i is None else words[i].as_py() for i in array.indices.to_pylist())


def _lists_in(array: Any) -> Iterator[Any]:
    array.validate(full=True)
    return (row.values if row.is_valid else None for row in array)


def _bare(type: Any) -> Any:
    """Returns the binary type for a string type: the same bytes, which need not be UTF-8."""
    pa = need("pyarrow", "arrow")
    bare = {
        pa.string(): pa.binary(),
        pa.large_string(): pa.large_binary(),
        pa.string_view(): pa.binary_view(),
    }
    return bare.get(type, type)


def _into(
    array: Any, step: Step, rows: npt.NDArray[np.int64], path: Path, bad: Bad
) -> tuple[Any, npt.NDArray[np.int64]]:
    """Takes one step into structs or lists; `rows` is the row number of each value."""
    compute = need("pyarrow.compute", str(path))
    if step is not None:
        return compute.struct_field(array, [step]), rows
    if not need("pyarrow", str(path)).types.is_fixed_size_list(array.type):
        offsets = array.offsets.to_numpy(zero_copy_only=False)
        if (offsets[1:] < offsets[:-1]).any():
            raise DataError(f"{path} is damaged: a list in it ends before it begins")
    if array.null_count:
        for row in rows[array.is_null().to_numpy(zero_copy_only=False)].tolist():
            bad(f"{path}: row {row}: the list of documents is null")
        valid = array.is_valid()
        array, rows = array.filter(valid), rows[valid.to_numpy(zero_copy_only=False)]
    parents = compute.list_parent_indices(array).to_numpy(zero_copy_only=False)
    return compute.list_flatten(array), rows[parents]


@contextmanager
def _reading_arrow(path: Path) -> Iterator[None]:
    pa = need("pyarrow", str(path))
    try:
        yield
    except (OSError, UnicodeDecodeError, MemoryError, pa.ArrowException) as error:
        reason = " ".join(str(error).split()) or "not enough memory for the size it claims"
        raise DataError(f"{path} cannot be read, or is truncated or damaged: {reason}") from None


def _leaves(place: Place, type: Any) -> Iterator[tuple[Place, Any]]:
    is_a = need("pyarrow", "arrow").types
    if is_a.is_struct(type) and type.num_fields:
        for field in type:
            yield from _leaves((*place, field.name), field.type)
    elif _is_list(type) and not is_a.is_integer(type.value_type):
        yield from _leaves((*place, None), type.value_type)
    else:
        yield place, type


def _kind_of(type: Any) -> Kind | None:
    is_a = need("pyarrow", "arrow").types
    if is_a.is_dictionary(type):
        type = type.value_type
    is_text = is_a.is_string(type) or is_a.is_large_string(type) or is_a.is_string_view(type)
    if is_text or _is_binary(type):
        return "text"
    return "tokens" if _is_list(type) and is_a.is_integer(type.value_type) else None


def _is_binary(type: Any) -> bool:
    is_a = need("pyarrow", "arrow").types
    return bool(is_a.is_binary(type) or is_a.is_large_binary(type) or is_a.is_binary_view(type))


def _is_list(type: Any) -> bool:
    is_a = need("pyarrow", "arrow").types
    return bool(is_a.is_list(type) or is_a.is_large_list(type) or is_a.is_fixed_size_list(type))
