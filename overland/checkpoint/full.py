"""`checkpoint.type = full`: whole tensors in files that need no index to be read.

The ranks write their parts as usual; rank 0 then assembles them, tensor by tensor, still in the
background. The bytes are written twice, but no rank ever holds more than one whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from overland.checkpoint.format import BLOCK, FileInfo, Index, Part, TensorEntry, checksum
from overland.checkpoint.formats.lazy import Stored
from overland.checkpoint.formats.overland import as_lazy_checkpoint
from overland.checkpoint.formats.torch import open_torch, write_torch
from overland.checkpoint.read import CheckpointReader
from overland.checkpoint.write import commit, write_whole_tensors
from overland.files import Disk, Moved, ignore


def write_full(
    beside: Path,
    index: Index,
    about: dict[str, Any],
    full_format: str,
    disk: Disk,
    moved: Moved = ignore,
) -> None:
    """Turns the parts in `beside` into a committed checkpoint of whole tensors in `beside`."""
    shards = beside.with_name(beside.name.removesuffix(".tmp") + ".shards")
    disk.remove_folder(shards)
    disk.rename(beside, shards)
    try:
        with CheckpointReader(shards, index, about, moved) as parts:
            if full_format == "torch":
                write_four_files(parts, beside, about, disk, moved)
            else:
                tensors = whole_tensors(parts)
                write_whole_tensors(
                    beside, tensors, index.run, about, disk, index.world_size, moved
                )
    finally:
        disk.remove_folder(shards)


def whole_tensors(checkpoint: CheckpointReader) -> list[Any]:
    return [
        (name, entry.dtype, entry.shape, lambda name=name: checkpoint.read(name))
        for name, entry in checkpoint.tensors.items()
    ]


def write_four_files(
    parts: CheckpointReader,
    folder: Path,
    about: dict[str, Any],
    disk: Disk,
    moved: Moved = ignore,
) -> None:
    """Writes model_state_dict.pt and its companions. Tensors are plain bytes in such files, so an
    index can point to them, and we read and verify them like our own."""
    disk.make_folder(folder)
    write_torch(as_lazy_checkpoint(parts, with_random_state=True), folder)
    disk.sync_folder(folder)
    tensors: dict[str, TensorEntry] = {}
    for name, lazy in open_torch(folder).tensors.items():
        assert isinstance(lazy, Stored), name
        sums = tuple(_checksums(lazy.path, lazy.offset, lazy.nbytes, moved))
        part = Part(lazy.path.name, lazy.offset, (0,) * len(lazy.shape), lazy.shape, sums)
        tensors[name] = TensorEntry(lazy.dtype, lazy.shape, [part] if lazy.nbytes else [])
    files = {path.name: _file_info(path, moved) for path in sorted(folder.iterdir())}
    index = Index("full", parts.index.world_size, tensors, files, parts.run)
    commit(folder, index, about, disk)


def _file_info(path: Path, moved: Moved) -> FileInfo:
    """Returns the checksums of a whole file: a zip holds more than tensors."""
    size = path.stat().st_size
    return FileInfo(size, 0, checksum(b""), tuple(_checksums(path, 0, size, moved)))


def _checksums(path: Path, offset: int, num_bytes: int, moved: Moved) -> Iterator[int]:
    with path.open("rb") as file:
        file.seek(offset)
        for begin in range(0, num_bytes, BLOCK):
            block = file.read(min(BLOCK, num_bytes - begin))
            moved(len(block))
            yield checksum(block)
