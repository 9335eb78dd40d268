"""The `index.json` of an MDS folder: its shards, with sizes and hashes, checked when it is read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overland.config.foreign import read_json, what_is_wrong
from overland.data.sources.compression import decompress, most_unfolded, reading
from overland.data.sources.source import inside
from overland.errors import DataError

INDEX = "index.json"
LARGEST_SHARD = 2**32 - 1  # what a shard's own table of 32-bit offsets can reach


@dataclass(frozen=True)
class Part:
    """A file as the index describes it."""

    name: str
    num_bytes: int
    hashes: dict[str, str]


@dataclass(frozen=True)
class Shard:
    raw: Part
    zipped: Part | None
    compression: str
    num_samples: int
    encodings: dict[str, str]
    """By column, in the order of a sample's bytes."""
    sizes: list[int | None]
    """Of each column; None: every sample says its own."""

    def stored(self, root: Path) -> Part:
        """The shard as it lies there: decompressed already, or not."""
        return self.raw if self.zipped is None or (root / self.raw.name).exists() else self.zipped


def is_mds(folder: Path) -> bool:
    """Whether it has an index of shards; or one that is wrong, next to shards."""
    try:
        index = read_json(folder / INDEX)
    except OSError:
        return False
    except ValueError:
        index = None
    is_right = isinstance(index, dict) and isinstance(index.get("shards"), list)
    return is_right or any(folder.glob("*.mds*"))


def read_index(root: Path) -> dict[str, Shard]:
    """Shards by the name of their file before compression, in the index's order."""
    path = root / INDEX
    try:
        with reading(path):
            index = read_json(path)
        shards = [_shard(entry, path) for entry in index["shards"]]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"{path} is no index of MDS shards: {what_is_wrong(error)}") from None
    by_name = {shard.raw.name: shard for shard in shards}
    if len(by_name) < len(shards):
        raise DataError(f"{path} names a shard twice")
    if not any(shard.num_samples for shard in shards):
        raise DataError(f"{path} is empty: it lists no samples")
    return by_name


def read_shard(root: Path, shard: Shard) -> bytes:
    """The bytes of a shard; what is stored and what comes out of it are both checked."""
    part = shard.stored(root)
    path = root / part.name
    with reading(path):
        _check_size(path.stat().st_size, part, path)
        if shard.raw.num_bytes > (most := most_unfolded(part.num_bytes)):
            raise DataError(
                f"{path} would unfold to {shard.raw.num_bytes:,} bytes; of a file of its size "
                f"{most:,} are read at most"
            )
        data = path.read_bytes()
        _check(data, part, path)
        if part is not shard.raw:
            data = decompress(data, shard.compression, path, shard.raw.num_bytes)
            _check(data, shard.raw, path)
    return data


def _shard(entry: dict[str, Any], index: Path) -> Shard:
    if entry["format"] != "mds" or entry["version"] != 2:
        raise DataError(
            f"{index}: shards of format {entry['format']}, version {entry['version']}; "
            "mds, version 2, is read"
        )
    if len(set(entry["column_names"])) != len(entry["column_sizes"]):
        raise ValueError("its lists of columns differ in length, or a column comes twice")
    zipped = entry["zip_data"]
    counts = [entry["samples"], *(size for size in entry["column_sizes"] if size is not None)]
    if any(not 0 <= int(count) <= LARGEST_SHARD for count in counts):
        raise ValueError(f"a number of samples or bytes that no shard has: {counts}")
    return Shard(
        _part(entry["raw_data"], index),
        None if zipped is None else _part(zipped, index),
        str(entry["compression"]).partition(":")[0],  # zstd:7 is zstd
        int(entry["samples"]),
        dict(zip(entry["column_names"], entry["column_encodings"], strict=True)),
        [None if size is None else int(size) for size in entry["column_sizes"]],
    )


def _part(entry: dict[str, Any], index: Path) -> Part:
    inside(index.parent, entry["basename"], index)
    if not 0 <= int(entry["bytes"]) <= LARGEST_SHARD:
        raise ValueError(f"{entry['basename']} of {entry['bytes']} bytes, which no shard has")
    return Part(entry["basename"], int(entry["bytes"]), dict(entry["hashes"]))


def _check(data: bytes, part: Part, path: Path) -> None:
    """Size and hashes, as far as Python has the algorithm (xxhash it has not)."""
    _check_size(len(data), part, path)
    for name, expected in part.hashes.items():
        if name in hashlib.algorithms_available and not name.startswith("shake"):  # of no length
            found = hashlib.new(name, data, usedforsecurity=False).hexdigest()
            if found != expected:
                raise DataError(
                    f"{path} is damaged: its {name} is {found}, the index says {expected}"
                )


def _check_size(size: int, part: Part, path: Path) -> None:
    if size != part.num_bytes:
        what = "is cut short" if size < part.num_bytes else "is too long"
        raise DataError(f"{path} {what}: {size:,} bytes where the index says {part.num_bytes:,}")
