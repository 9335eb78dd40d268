"""`checkpoint.type = full`: whole tensors in files that need no index to be read.

The ranks write their parts as usual; rank 0 then assembles them, tensor by tensor, still in the
background. The bytes are written twice, but no rank ever holds more than one whole tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from overland.checkpoint.format import Index
from overland.checkpoint.read import CheckpointReader
from overland.checkpoint.write import write_whole_tensors
from overland.files import Disk, Moved, ignore
from overland.plugins import plugin


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
                plugin("four_files").write_four_files(parts, beside, about, disk, moved)
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
