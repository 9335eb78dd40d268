"""`checkpoint.type = full`: whole tensors in files that need no index to be read.

The ranks write their parts as always; rank 0 then puts them together, tensor by tensor, still in
the background. It costs the bytes twice, and no device and no rank ever holds more than one tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from overland.checkpoint.disk import Disk
from overland.checkpoint.format import Index
from overland.checkpoint.read import Checkpoint
from overland.checkpoint.write import write_whole


def write_full(
    beside: Path, index: Index, about: dict[str, Any], full_format: str, disk: Disk
) -> None:
    """Turns the parts in `beside` into a committed checkpoint of whole tensors in `beside`."""
    shards = beside.with_name(beside.name.removesuffix(".tmp") + ".shards")
    disk.remove_folder(shards)
    disk.rename(beside, shards)
    with Checkpoint(shards, index, about) as parts:
        write_whole(beside, whole_tensors(parts), index.run, about, disk)
    disk.remove_folder(shards)


def whole_tensors(checkpoint: Checkpoint) -> list[Any]:
    return [
        (name, entry.dtype, entry.shape, lambda name=name: checkpoint.read(name))
        for name, entry in checkpoint.tensors.items()
    ]
