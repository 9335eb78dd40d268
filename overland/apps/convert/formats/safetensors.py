"""Reads safetensors files, checking the header before trusting it, and writes them as a stream,
with the checksums of an exported folder.

A folder that we export has `checksums.json` next to them: the CRC-32 of each tensor and header.
Another tool may write the weights again, but cannot keep such sums right, so they are not in the
header.

One file with all weights, as DeepSpeed's `zero_to_fp32` writes it, is a separate format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from overland.apps.convert.formats.lazy import (
    MAX_DIMS,
    Config,
    LazyCheckpoint,
    Options,
    Stored,
    config_near,
)
from overland.checkpoint.format import DTYPE_NAMES, DTYPES, checksum, header_of
from overland.checkpoint.lazy import MODEL, Lazy, counter
from overland.checkpoint.write import bytes_of
from overland.errors import CheckpointError
from overland.files import CHECKSUMS, checksums_of, new_file, what_is_wrong
from overland.plugins import plugin

# The limit of the safetensors library.
MAX_HEADER_BYTES = 100_000_000

Checksums = dict[str, dict[str, int]]
"""Of each file: CRC-32 by the name of a tensor; the header's under an empty name."""


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Returns the tensors of a file. They must fill it: no gap, no overlap, nothing beyond its
    end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path} is not a safetensors file: its header would be {length} bytes long"
            )
        text = file.read(length)
    counter()(8 + length)
    sums = checksums_of(path, CheckpointError)
    if sums is not None and sums.get("") != checksum(length.to_bytes(8, "little") + text):
        raise CheckpointError(
            f"{path} is damaged: it does not match {CHECKSUMS}, which was written with it; if it "
            f"was replaced on purpose, delete {CHECKSUMS}"
        )
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _entry(path, 8 + length, entry) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a safetensors file: its header is invalid ({what_is_wrong(error)})"
        ) from None
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            raise CheckpointError(f"{path}: {name} does not begin where the tensor before it ends")
        end += tensor.nbytes
    if end != size:
        raise CheckpointError(f"{path} has {size} bytes, but its header describes {end}")
    if sums is not None:
        return {name: replace(one, crc32=sums.get(name)) for name, one in tensors.items()}
    return tensors


def read_weights(path: Path) -> dict[str, Lazy]:
    """Returns the tensors of a file of safetensors, or else of torch.save."""
    is_safe = path.suffix == ".safetensors"
    return dict(read_safetensors(path) if is_safe else plugin("torch_files").tensors_of(path))


def write_checksums(folder: Path, sums: Checksums) -> None:
    with new_file(folder / CHECKSUMS) as file:
        file.write(json.dumps(sums, indent=1, sort_keys=True).encode())


def write_safetensors(path: Path, tensors: Mapping[str, Lazy]) -> Checksums:
    """Writes the header first, since shapes and dtypes are known, then one tensor after the
    other. Returns their checksums."""
    # Writing wide dtypes first keeps every tensor aligned to its own width.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    for name in order:
        if tensors[name].dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{name} has dtype {tensors[name].dtype}, which safetensors cannot store"
            )
    header = header_of((name, tensors[name].dtype, tensors[name].shape) for name in order)
    sums = {"": checksum(header)}
    with new_file(path) as file:
        file.write(header)
        for name in order:
            data = bytes_of(tensors[name].load())
            sums[name] = checksum(data)
            file.write(data)
    return {path.name: sums}


def _entry(path: Path, data: int, entry: Any) -> Stored:
    start, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
    numbers = (start, end, *shape)
    if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
        raise ValueError("sizes and offsets must be natural numbers")
    if len(shape) > MAX_DIMS:
        raise ValueError(f"a tensor with {len(shape)} dims")
    tensor = Stored(shape, dtype, path, data + start)
    if end - start != tensor.nbytes:
        raise ValueError(f"{end - start} bytes for shape {list(shape)} of {dtype}")
    return tensor


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    contents = dict(pairs)
    if len(contents) != len(pairs):
        raise ValueError("a name occurs twice")
    return contents


def detect_single(path: Path) -> bool:
    return path.is_file() and path.suffix == ".safetensors"


def open_single(path: Path, config: Config = None) -> LazyCheckpoint:
    return LazyCheckpoint(
        "safetensors",
        path.parent,
        {MODEL + name: lazy for name, lazy in read_safetensors(path).items()},
        config=config or config_near(path.parent),
    )


def write_single(source: LazyCheckpoint, file: Path, options: Options) -> None:
    write_safetensors(file, source.weights())
