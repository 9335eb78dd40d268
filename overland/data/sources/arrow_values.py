"""Documents out of Arrow's arrays; parquet gives the same arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overland.data.sources.columns import Column, Place, Step, name_of, no_column
from overland.data.sources.records import values_at
from overland.data.sources.source import Bad, Document, Kind, decode, token_ids
from overland.errors import DataError
from overland.packages import need


def columns_of(schema: Any) -> dict[str, Column]:
    """Every column by name; of structs and lists, what they hold."""
    columns: dict[str, Column] = {}
    for field in schema:
        for place, type in _leaves((field.name,), field.type):
            kind = _kind_of(type)
            # Bytes may be text; under a name of token ids they are ids of an unknown type.
            if place[-1] in ("tokens", "input_ids") and _is_binary(type):
                kind = None
            columns.setdefault(name_of(place), Column(str(type), place, kind))
    return columns


def check_column(path: Path, schema: Any, column: str, like: Column) -> None:
    """Files of one corpus may differ; what one of them lacks is told with its name."""
    columns = columns_of(schema)
    if column not in columns:
        raise no_column(path, column, columns, ", ".join(columns))
    if columns[column].kind != like.kind:
        type = columns[column].type
        raise DataError(f"{path}: column {column!r} is {type}, in other files {like.kind}")


def examples_of(table: Any, columns: Mapping[str, Column]) -> dict[str, Any]:
    """The first value of each column that is not null, from some rows."""
    rows = table.to_pylist()
    found = {}
    for name, column in columns.items():
        values = (value for row in rows for value in values_at(row, column.place))
        found[name] = next((value for value in values if value is not None), None)
    return found


def documents(
    array: Any, place: Place, kind: Kind, path: Path, first: int, bad: Bad
) -> Iterator[Document]:
    """Of one column, or of what lies at `place` in it; `first` is its first row in the file.

    Arrow takes lengths and offsets of a file for granted, and reads wherever they point; so they
    are looked at before they are used.
    """
    array.validate()
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
            yield document


def _bytes_in(array: Any, path: Path) -> Iterator[bytes | None]:
    """Each text as bytes, so that one that is no UTF-8 can be told from its neighbours. What a
    dictionary holds is given out row by row: a short file can repeat a long text many times."""
    pa = need("pyarrow", str(path))
    if not pa.types.is_dictionary(array.type):
        array = array.view(_bare(array.type))
        array.validate(full=True)
        return (value.as_py() for value in array)
    words = array.dictionary.view(_bare(array.dictionary.type))
    words.validate(full=True)
    limits = need("pyarrow.compute", str(path)).min_max(array.indices).as_py()
    if limits["min"] is not None and not 0 <= limits["min"] <= limits["max"] < len(words):
        raise DataError(f"{path} is damaged: an index of its dictionary of {len(words):,} is wrong")
    return (None if i is None else words[i].as_py() for i in array.indices.to_pylist())


def _lists_in(array: Any) -> Iterator[Any]:
    array.validate(full=True)
    return (row.values if row.is_valid else None for row in array)


def _bare(type: Any) -> Any:
    """The type of the same bytes that need not be UTF-8."""
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
    """One step into structs or lists; `rows` says of each value which row it is from."""
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
def reading_arrow(path: Path) -> Iterator[None]:
    pa = need("pyarrow", str(path))
    try:
        yield
    except (OSError, UnicodeDecodeError, MemoryError, pa.ArrowException) as error:
        reason = " ".join(str(error).split()) or "there is no memory for what it claims to hold"
        raise DataError(f"{path} cannot be read, is cut short or damaged: {reason}") from None


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
