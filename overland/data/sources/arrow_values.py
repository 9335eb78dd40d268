"""Documents out of Arrow's arrays; parquet gives the same arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from overland.data.errors import DataError
from overland.data.sources.columns import did_you_mean
from overland.data.sources.needs import need
from overland.data.sources.source import Bad, Document, Kind, decode, token_ids


def kinds_of(schema: Any) -> dict[str, Kind]:
    """The columns that hold documents."""
    return {field.name: kind for field in schema if (kind := _kind_of(field.type))}


def types_of(schema: Any) -> dict[str, str]:
    return {field.name: str(field.type) for field in schema}


def check_column(path: Path, schema: Any, column: str, kind: Kind) -> None:
    """Files of one corpus may differ; what one of them lacks is told with its name."""
    types, kinds = types_of(schema), kinds_of(schema)
    if column not in types:
        has = ", ".join(types)
        near = did_you_mean(column, types)
        raise DataError(f"{path} has no column {column!r}{near}; its columns: {has}")
    if kinds.get(column) != kind:
        raise DataError(f"{path}: column {column!r} is {types[column]}, in other files {kind}")


def documents(array: Any, kind: Kind, path: Path, first: int, bad: Bad) -> Iterator[Document]:
    """Of one column; `first` is the number of its first row in the file."""
    pa = need("pyarrow", str(path))
    name = str(path)
    if kind == "text":
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        # As bytes, so that one document that is no UTF-8 can be told from its neighbours.
        values = array.cast(pa.large_binary()).to_pylist()
    else:
        values = [row.values if row.is_valid else None for row in array]
    for row, value in enumerate(values, start=first):
        where = f"{name}: row {row}"
        if value is None:
            bad(f"{where}: the document is null")
            continue
        if kind == "text":
            document: Document | None = decode(value, where, bad)
        else:
            document = token_ids(value.to_numpy(zero_copy_only=False), where, bad)
        if document is not None:
            yield document


@contextmanager
def reading_arrow(path: Path) -> Iterator[None]:
    pa = need("pyarrow", str(path))
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read, is cut short or damaged: {reason}") from None


def _kind_of(type: Any) -> Kind | None:
    pa = need("pyarrow", "arrow")
    is_a = pa.types
    if is_a.is_dictionary(type):
        type = type.value_type
    if is_a.is_string(type) or is_a.is_large_string(type):
        return "text"
    is_list = is_a.is_list(type) or is_a.is_large_list(type) or is_a.is_fixed_size_list(type)
    return "tokens" if is_list and is_a.is_integer(type.value_type) else None
