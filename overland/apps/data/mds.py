"""MosaicML's streaming format (MDS), read without its library: `index.json` next to its shards.

A shard is `uint32 n | uint32 offsets[n + 1] | JSON | samples`; a sample is the sizes of its
variable columns (uint32 each) followed by the bytes of all columns. The index has every shard's
size and, if the writer was configured to store them, its hashes, before and after compression.
Values are decoded by the name of their encoding; pickles are never loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from overland.data.sources import INDEX
from overland.data.sources.columns import Column, ColumnFiles, ColumnSample, values_at
from overland.data.sources.compression import decompress, most_unfolded, reading
from overland.data.sources.source import (
    TOKEN_DTYPES,
    Document,
    Kind,
    Located,
    check_dtype,
    inside_folder,
)
from overland.errors import ChoiceRequired, DataError
from overland.files import parse_json, read_json, what_is_wrong

LOOKED_AT = 100  # samples read to decide what a column of JSON holds
LARGEST_SHARD = 2**32 - 1  # what a shard's own table of 32-bit offsets can reach
# Codes that a value begins with if the encoding's name does not specify the type.
DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64",
    65: "int64", 18: "float16", 34: "float32", 66: "float64",
}  # fmt: skip
SHAPE_DTYPES = ("<u1", "<u2", "<u4", "<u8")


class MDS(ColumnFiles):
    """A chunk is a shard. Columns of bytes are token ids of `dtype`, as llm-foundry writes them."""

    format = "mds"

    def __init__(
        self,
        root: Path,
        column: str | None = None,
        dtype: str | None = None,
        skip_bad: bool = False,
    ) -> None:
        self._shards = read_mds_index(root)
        super().__init__(root, self._shards, skip_bad)
        self.dtype = check_dtype(dtype) or "int64"
        self.columns = next(iter(self._shards.values())).encodings
        in_json = self._kinds_of_json()
        columns = {
            name: Column(code, (name,), in_json.get(name) or kind_of_encoding(code))
            for name, code in self.columns.items()
        }
        self.choose(root, column, columns, self._examples)
        if dtype is None and self.columns.get(self.column or "") == "bytes":
            self._check_int64()

    def num_documents(self, chunk: str) -> int | None:
        return self._shards[chunk].num_samples

    def read(self, chunk: str) -> Iterator[Document]:
        dtype = np.dtype(self.dtype).newbyteorder("<")
        for record in self.records(chunk, list(map(str, self.steps))):
            (value,) = values_at(record, self.steps)
            if isinstance(value, bytes) and len(value) % dtype.itemsize == 0:
                value = np.frombuffer(value, dtype)
            document = self.document(value, record.where, partial(self._expected, value))
            if document is not None:
                yield document

    def _expected(self, value: object) -> str:
        what = "token ids" if self.kind == "tokens" else "text"
        return f"expected {what} in {self.column!r}, got {str(value)[:60]!r}"

    def records(self, chunk: str, names: Sequence[str] = ()) -> Iterator[Located]:
        """Yields these columns of each sample, or all of them, decoded."""
        for number, raw in enumerate(self._raw(chunk, names or list(self.columns))):
            where, record = f"{self.root / chunk}: sample {number:,}", dict[str, Any]()
            try:
                for name, data in raw.items():
                    record[name] = decode_value(self.columns[name], data)
            except (ValueError, IndexError) as error:
                self.bad(f"{where}: column {name!r}: {error}")
            else:
                yield Located(record, where)

    def depends_on(self) -> list[str]:
        return [INDEX, *(file for chunk in self._shards for file in self.files_of(chunk))]

    def files_of(self, chunk: str) -> list[str]:
        return [self._shards[chunk].stored(self.root).name]

    def _kinds_of_json(self) -> dict[str, Kind]:
        """Returns the kinds of JSON columns, whose encoding does not tell, from some samples."""
        sample = ColumnSample()
        for name, value in self._values([n for n, code in self.columns.items() if code == "json"]):
            sample.add({name: value})
        return {name: one.kind for name, one in sample.columns(None).items() if one.kind}

    def _examples(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in self._values(list(self.columns)):
            found.setdefault(name, value)
        return found

    def _values(self, names: list[str]) -> Iterator[tuple[str, Any]]:
        """Yields names and values of these columns in some samples; reading reports bad ones."""
        for raw in self._some(names):
            for name, data in raw.items():
                with contextlib.suppress(ValueError, IndexError):
                    yield name, decode_value(self.columns[name], data)

    def _check_int64(self) -> None:
        """Detects another type: its bytes are not a multiple of eight, or give impossible ids."""
        assert self.column is not None
        for raw in self._some([self.column]):
            data = raw[self.column]
            ids = np.frombuffer(data[: len(data) // 8 * 8], "<i8")
            if len(data) % 8 or (ids.size and not 0 <= ids.min() <= ids.max() < 1 << 32):
                raise ChoiceRequired(
                    f"{self.root}: the bytes in column {self.column!r} are not int64 ids: set ",
                    "dtype",
                    " to their type, such as uint16",
                )

    def _some(self, names: list[str]) -> Iterator[dict[str, bytes]]:
        """Yields the first samples of the first shard that has any."""
        shards = (file for file, shard in self._shards.items() if shard.num_samples)
        file = next(shards, None)
        if names and file is not None:
            yield from itertools.islice(self._raw(file, names), LOOKED_AT)

    def _raw(self, chunk: str, names: Sequence[str]) -> Iterator[dict[str, bytes]]:
        """Yields the bytes of the named columns of each sample."""
        shard, path = self._shards[chunk], self.root / chunk
        for name in names:
            if shard.encodings.get(name) != self.columns[name]:
                raise DataError(
                    f"{path}: column {name!r} ({self.columns[name]}) is not in this shard, "
                    f"whose columns are {', '.join(shard.encodings)}"
                )
        data = read_shard(self.root, shard)
        offsets = _offsets(data, shard.num_samples, path)
        num_variable = shard.sizes.count(None)
        for number in range(len(offsets) - 1):
            sample = data[offsets[number] : offsets[number + 1]]
            places = iter(np.frombuffer(sample[: 4 * num_variable], "<u4").tolist())
            place, found = 4 * num_variable, {}
            for name, size in zip(shard.encodings, shard.sizes, strict=True):
                end = place + (next(places, 0) if size is None else size)
                if name in names:
                    found[name] = sample[place:end]
                place = end
            if place != len(sample):
                raise DataError(
                    f"{path} is damaged: sample {number:,} has {len(sample):,} bytes, but its "
                    f"columns take {place:,}"
                )
            yield found


def _offsets(data: bytes, num_samples: int, path: Path) -> list[int]:
    """Returns the offset where each sample begins, and where the last one ends."""
    count = int.from_bytes(data[:4], "little")
    if count != num_samples:
        raise DataError(f"{path} has {count:,} samples, but the index says {num_samples:,}")
    offsets: list[int] = np.frombuffer(data[4 : 4 * (count + 2)], "<u4").tolist()
    if len(offsets) != count + 1 or offsets[-1] != len(data) or offsets != sorted(offsets):
        raise DataError(f"{path} is damaged: its table of samples does not match its size")
    return offsets


@dataclass(frozen=True)
class ListedFile:
    """A file as the index describes it."""

    name: str
    num_bytes: int
    hashes: dict[str, str]


@dataclass(frozen=True)
class MDSShard:
    raw: ListedFile
    zipped: ListedFile | None
    compression: str
    num_samples: int
    encodings: dict[str, str]
    """The encoding of each column, in the order of a sample's bytes."""
    sizes: list[int | None]
    """The size of each column, or None if every sample has its own."""

    def stored(self, root: Path) -> ListedFile:
        """Returns the shard's file on disk, which may already be decompressed."""
        return self.raw if self.zipped is None or (root / self.raw.name).exists() else self.zipped


def read_mds_index(root: Path) -> dict[str, MDSShard]:
    """Returns the shards by the name of their uncompressed file, in the index's order."""
    path = root / INDEX
    try:
        with reading(path):
            index = read_json(path)
        shards = [_shard(entry, path) for entry in index["shards"]]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"{path} is not an index of MDS shards: {what_is_wrong(error)}") from None
    by_name = {shard.raw.name: shard for shard in shards}
    if len(by_name) < len(shards):
        raise DataError(f"{path} lists a shard twice")
    if not any(shard.num_samples for shard in shards):
        raise DataError(f"{path} is empty: it lists no samples")
    return by_name


def read_shard(root: Path, shard: MDSShard) -> bytes:
    """Reads the bytes of a shard, and checks them before and after decompression."""
    part = shard.stored(root)
    path = root / part.name
    with reading(path):
        _check_size(path.stat().st_size, part, path)
        if shard.raw.num_bytes > (most := most_unfolded(part.num_bytes)):
            raise DataError(
                f"{path} would decompress to {shard.raw.num_bytes:,} bytes; the limit for a file "
                f"of its size is {most:,}"
            )
        data = path.read_bytes()
        _check(data, part, path)
        if part is not shard.raw:
            data = decompress(data, shard.compression, path, shard.raw.num_bytes)
            _check(data, shard.raw, path)
    return data


def _shard(entry: dict[str, Any], index: Path) -> MDSShard:
    if entry["format"] != "mds" or entry["version"] != 2:
        raise DataError(
            f"{index} lists shards of format {entry['format']}, version {entry['version']}; "
            "only mds version 2 is supported"
        )
    if len(set(entry["column_names"])) != len(entry["column_sizes"]):
        raise ValueError("its lists of columns differ in length, or a column is listed twice")
    zipped = entry["zip_data"]
    counts = [entry["samples"], *(size for size in entry["column_sizes"] if size is not None)]
    if any(not 0 <= int(count) <= LARGEST_SHARD for count in counts):
        raise ValueError(f"impossible number of samples or bytes: {counts}")
    return MDSShard(
        _part(entry["raw_data"], index),
        None if zipped is None else _part(zipped, index),
        str(entry["compression"]).partition(":")[0],  # zstd:7 is zstd
        int(entry["samples"]),
        dict(zip(entry["column_names"], entry["column_encodings"], strict=True)),
        [None if size is None else int(size) for size in entry["column_sizes"]],
    )


def _part(entry: dict[str, Any], index: Path) -> ListedFile:
    inside_folder(index.parent, entry["basename"], index)
    if not 0 <= int(entry["bytes"]) <= LARGEST_SHARD:
        raise ValueError(f"impossible size of {entry['basename']}: {entry['bytes']} bytes")
    return ListedFile(entry["basename"], int(entry["bytes"]), dict(entry["hashes"]))


def _check(data: bytes, part: ListedFile, path: Path) -> None:
    """Checks the size, and hashes whose algorithm Python has (it does not have xxhash)."""
    _check_size(len(data), part, path)
    for name, expected in part.hashes.items():
        # SHAKE digests have no fixed length to compare.
        if name in hashlib.algorithms_available and not name.startswith("shake"):
            found = hashlib.new(name, data, usedforsecurity=False).hexdigest()
            if found != expected:
                raise DataError(
                    f"{path} is damaged: its {name} is {found}, but the index says {expected}"
                )


def _check_size(size: int, part: ListedFile, path: Path) -> None:
    if size != part.num_bytes:
        what = "is truncated" if size < part.num_bytes else "is too long"
        raise DataError(f"{path} {what}: {size:,} bytes, but the index says {part.num_bytes:,}")


def kind_of_encoding(encoding: str) -> Kind | None:
    """Returns the kind of documents that a column can hold; for JSON, only its values can tell."""
    name, _, rest = encoding.partition(":")
    if name == "str":
        return "text"
    dtype, *shape = rest.split(":")
    is_ids = name == "ndarray" and dtype in ("", *TOKEN_DTYPES) and len(shape) < 2
    return "tokens" if is_ids or name == "bytes" else None


def decode_value(encoding: str, data: bytes) -> Any:
    """Decodes a value. Raises ValueError or IndexError if it is invalid."""
    name, _, rest = encoding.partition(":")
    if name in ("str", "json"):
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            reason = f"{error.reason} at byte {error.start:,}"
            raise ValueError(f"expected UTF-8 text, got {reason}") from None
        return text if name == "str" else parse_json(text)
    if name == "bytes":
        return data
    if name == "int":
        return int(_array(data, "int64")[0])
    if name in DTYPES.values():
        return _array(data, name)[0].item()
    if name == "ndarray":
        return _decode_ndarray(data, *rest.split(":")) if rest else _decode_ndarray(data)
    raise ValueError(f"encoding {encoding!r} is not supported")


def _decode_ndarray(data: bytes, dtype: str | None = None, shape: str | None = None) -> Any:
    """Decodes an array. Its type and shape are in the encoding's name or precede the values."""
    try:
        if dtype is None:
            dtype, data = DTYPES[data[0]], data[1:]
        if shape is not None:
            sizes = [int(size) for size in shape.split(",")]
        else:
            num_dims, code = data[0] >> 2, data[0] & 3
            end = 1 + num_dims * 2**code
            sizes = np.frombuffer(data[1:end], SHAPE_DTYPES[code]).tolist()
            data = data[end:]
    except (IndexError, KeyError):
        raise ValueError("the array's header is damaged") from None
    return _array(data, dtype).reshape(sizes)


def _array(data: bytes, dtype: str) -> Any:
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
