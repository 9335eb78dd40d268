"""MosaicML's streaming format, read without its library: `index.json` and shards beside it.

A shard is `uint32 n | uint32 offsets[n + 1] | JSON | samples`; a sample is the sizes of its
variable columns (uint32 each) followed by the bytes of all columns. The index has every shard's
size and, if the writer was asked for them, its hashes, before and after compression.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from overland.data.sources.columns import Column, choose_column
from overland.data.sources.mds_columns import decode_value, kind_of
from overland.data.sources.mds_index import INDEX, read_index, read_shard
from overland.data.sources.records import Sample
from overland.data.sources.source import Document, FileSource, Kind, check_dtype, token_ids
from overland.errors import DataError, Unsettled

LOOKED_AT = 100  # samples, to settle what a column of JSON holds


class MDS(FileSource):
    """A chunk is a shard. Columns of bytes are ids of `dtype`, as llm-foundry writes them."""

    format = "mds"

    def __init__(
        self,
        root: Path,
        column: str | None = None,
        dtype: str | None = None,
        skip_bad: bool = False,
    ) -> None:
        self._shards = read_index(root)
        super().__init__(root, self._shards, skip_bad)
        self.dtype = check_dtype(dtype) or "int64"
        first = next(iter(self._shards.values()))
        self.columns = dict(first.encodings)
        in_json = self._kinds_of_json()
        columns = {
            name: Column(code, (name,), in_json.get(name) or kind_of(code))
            for name, code in self.columns.items()
        }
        self.column = choose_column(root, column, columns, self._examples)
        self.kind = columns[self.column].kind or "text"
        if dtype is None and self.columns[self.column] == "bytes":
            self._check_int64()

    def num_documents(self, chunk: str) -> int | None:
        return self._shards[chunk].num_samples

    def read(self, chunk: str) -> Iterator[Document]:
        assert self.column is not None
        path = self.root / chunk
        for number, raw in enumerate(self._raw(chunk, [self.column])):
            document = self._document(raw[self.column], f"{path}: sample {number:,}")
            if document is not None:
                yield document

    def records(self, chunk: str) -> Iterator[dict[str, Any]]:
        """All columns of each sample, decoded."""
        for number, raw in enumerate(self._raw(chunk, list(self.columns))):
            try:
                yield {name: decode_value(self.columns[name], raw[name]) for name in raw}
            except (ValueError, IndexError) as error:
                self.bad(f"{self.root / chunk}: sample {number:,}: {error}")

    def depends_on(self) -> list[str]:
        return [INDEX, *(file for chunk in self._shards for file in self.files_of(chunk))]

    def files_of(self, chunk: str) -> list[str]:
        return [self._shards[chunk].stored(self.root).name]

    def _document(self, data: bytes, where: str) -> Document | None:
        assert self.column is not None
        try:
            value = decode_value(self.columns[self.column], data)
            if isinstance(value, bytes):
                value = np.frombuffer(value, np.dtype(self.dtype).newbyteorder("<"))
        except UnicodeDecodeError as error:  # a ValueError, too
            self.bad(f"{where}: expected UTF-8 text, got {error.reason} at byte {error.start:,}")
            return None
        except ValueError as error:
            self.bad(f"{where}: column {self.column!r}: {error}")
            return None
        if self.kind == "tokens":
            return token_ids(value, where, self.bad)
        if not isinstance(value, str):
            self.bad(f"{where}: expected text in {self.column!r}, got {str(value)[:60]!r}")
            return None
        return value

    def _kinds_of_json(self) -> dict[str, Kind]:
        """Of the columns whose encoding leaves it open, by some samples."""
        names = [name for name, code in self.columns.items() if code == "json"]
        sample = Sample()
        for raw in self._some(names):
            for name, data in raw.items():
                with contextlib.suppress(ValueError):  # reading will say so
                    sample.add({name: decode_value("json", data)})
        return {name: one.kind for name, one in sample.columns("").items() if one.kind}

    def _examples(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for raw in self._some(list(self.columns)):
            for name, data in raw.items():
                with contextlib.suppress(ValueError, IndexError):
                    found.setdefault(name, decode_value(self.columns[name], data))
        return found

    def _check_int64(self) -> None:
        """Bytes of another type either do not divide by eight or are ids that nobody has."""
        assert self.column is not None
        for raw in self._some([self.column]):
            data = raw[self.column]
            ids = np.frombuffer(data[: len(data) // 8 * 8], "<i8")
            if len(data) % 8 or (ids.size and not 0 <= ids.min() <= ids.max() < 1 << 32):
                raise Unsettled(
                    f"{self.root}: column {self.column!r} holds bytes that are no int64 ids: set ",
                    "dtype",
                    " to their type, such as uint16",
                )

    def _some(self, names: list[str]) -> Iterator[dict[str, bytes]]:
        """The first samples of the first shard that has any."""
        shards = (file for file, shard in self._shards.items() if shard.num_samples)
        file = next(shards, None)
        if names and file is not None:
            yield from itertools.islice(self._raw(file, names), LOOKED_AT)

    def _raw(self, chunk: str, names: list[str]) -> Iterator[dict[str, bytes]]:
        """The bytes of the named columns of each sample."""
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
                    f"{path}: sample {number:,} has {len(sample):,} bytes where its columns take "
                    f"{place:,}: the shard is damaged"
                )
            yield found


def _offsets(data: bytes, num_samples: int, path: Path) -> list[int]:
    """Where each sample begins, and the last one ends."""
    count = int.from_bytes(data[:4], "little")
    if count != num_samples:
        raise DataError(f"{path} holds {count:,} samples; the index says {num_samples:,}")
    offsets: list[int] = np.frombuffer(data[4 : 4 * (count + 2)], "<u4").tolist()
    if len(offsets) != count + 1 or offsets[-1] != len(data) or offsets != sorted(offsets):
        raise DataError(f"{path} is damaged: its table of samples does not fit its size")
    return offsets
