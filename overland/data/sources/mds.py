"""MosaicML's streaming format, read without its library: `index.json` and shards beside it.

A shard is `uint32 n | uint32 offsets[n + 1] | JSON | samples`; a sample is the sizes of its
variable columns (uint32 each) followed by the bytes of all columns. The index has every shard's
size and, if the writer was asked for them, its hashes, before and after compression.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from overland.data.errors import DataError
from overland.data.sources.columns import choose_column
from overland.data.sources.mds_columns import decode_value, kind_of
from overland.data.sources.mds_index import INDEX, read_index, read_shard
from overland.data.sources.source import Document, FileSource, Kind, check_dtype, token_ids


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
        kinds = {name: kind for name, code in self.columns.items() if (kind := kind_of(code))}
        kinds |= self._kinds_of_json()
        self.column = choose_column(root, column, self.columns, kinds)
        self.kind = kinds[self.column]

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
        names = [name for name, code in self.columns.items() if code == "json"]
        samples = (
            self._raw(file, names) for file, shard in self._shards.items() if shard.num_samples
        )
        if not names or (first := next(samples, None)) is None:
            return {}
        found: dict[str, Kind] = {}
        for name, data in next(first).items():
            try:
                value = decode_value("json", data)
            except ValueError:  # reading will say so
                continue
            if isinstance(value, str):
                found[name] = "text"
            elif isinstance(value, list) and all(type(item) is int for item in value):
                found[name] = "tokens"
        return found

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
