"""Plans which rank writes which part of each tensor, and into which files, once per run, since a
run's tensors do not change.

Of several ranks that hold the same box of a tensor, one is chosen by the tensor's name, without
communication; only the rest goes to rank 0, which drops the remaining duplicates (plain tensors,
and tied ones at both ends of a pipeline). Rank 0 alone, as in PyTorch's DCP, took 83 µs for each
box of each rank, which is minutes for a thousand ranks. Then the boxes are laid out in files.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from overland.checkpoint.format import DTYPE_NAMES, DTYPES, header_of, name_of_part
from overland.errors import CheckpointError
from overland.parallel.sharding import local_part, shard_of
from overland.world import exchange

# Most file systems let only one thread at a time write to a file, so a rank with much to write uses
# several files (measured: 1.6 GB/s into one file, 2.2 into four).
MAX_FILES_PER_RANK = 4
FILE_BYTES = 2**30

T = TypeVar("T")


@dataclass(frozen=True)
class PackedTensor:
    """A tensor that is stored packed in other tensors: these are copied to the host as they are,
    and `unpack` turns them into what is saved. `like` has its shape and placement. Each block of
    `block` elements is unpacked independently; the first dimension of the packed tensors counts the
    blocks, and if a block is a single element, all dimensions do."""

    like: Tensor
    dtype: torch.dtype
    kept: tuple[Tensor, ...]
    unpack: Callable[..., Tensor]
    block: int = 1


State = Mapping[str, Tensor | PackedTensor]


class Box(NamedTuple):
    """A part of a tensor that one rank writes. `whole` is the shape of the whole tensor."""

    name: str
    dtype: torch.dtype
    whole: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    """A file that one rank writes, and the boxes in it."""

    name: str
    boxes: list[Box]

    @cached_property
    def header(self) -> bytes:
        return header_of(
            (name_of_part(box.name, box.start, box.shape, box.whole), box.dtype, box.shape)
            for box in self.boxes
        )

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(box.num_bytes for box in self.boxes)


@dataclass(frozen=True)
class SavePlan:
    """This rank's files; rank 0 also has those of all ranks, because it writes the index."""

    files: list[FilePlan]
    files_of_ranks: list[list[FilePlan]]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def plan_save(state: State, group: dist.ProcessGroup | None) -> SavePlan:
    """Plans which rank writes what; called by all ranks together. `group` is None for a single
    process."""
    rank = dist.get_rank(group) if group else 0
    boxes = boxes_to_write(state)
    boxes_of_ranks = gather_boxes(boxes, group)
    dropped_of_ranks = drop_copies(boxes_of_ranks)
    kept = without(boxes, scatter(dropped_of_ranks, group))
    kept_of_ranks = list(map(without, boxes_of_ranks, dropped_of_ranks))
    check_whole(kept_of_ranks)
    return SavePlan(
        lay_out_files(kept, rank), [lay_out_files(some, r) for r, some in enumerate(kept_of_ranks)]
    )


def boxes_to_write(state: State) -> list[Box]:
    """Returns the boxes on this rank, except those that another holder of the same box writes."""
    boxes = []
    for name, value in state.items():
        tensor = value.like if isinstance(value, PackedTensor) else value
        if _is_writer(name, tensor):
            shard, start, whole = local_part(tensor)
            boxes.append(Box(name, value.dtype, whole, start, tuple(shard.shape)))
    return [box for box in boxes if box.num_bytes]


def drop_copies(boxes_of_ranks: Sequence[Sequence[Box]]) -> list[set[int]]:
    """Returns, for each rank, which of its boxes an earlier rank also has."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    dropped: list[set[int]] = []
    for boxes in boxes_of_ranks:
        dropped.append({i for i, box in enumerate(boxes) if (box.name, box.start) in seen})
        seen.update((box.name, box.start) for box in boxes)
    return dropped


def without(boxes: Sequence[Box], dropped: set[int]) -> list[Box]:
    return [box for i, box in enumerate(boxes) if i not in dropped]


def check_whole(boxes_of_ranks: Sequence[Sequence[Box]]) -> None:
    """Raises if boxes do not add up to their tensors. Only rank 0 has all of them."""
    volumes: dict[str, int] = {}
    for boxes in boxes_of_ranks:
        for box in boxes:
            left = volumes.get(box.name, math.prod(box.whole))
            volumes[box.name] = left - math.prod(box.shape)
    wrong = [name for name, left in volumes.items() if left]
    if wrong:
        raise CheckpointError(f"the ranks' parts of {wrong[0]} do not add up to the whole tensor")


def lay_out_files(boxes: Sequence[Box], rank: int) -> list[FilePlan]:
    """Distributes boxes over files of about equal size."""
    boxes = [box for box in boxes if box.num_bytes]
    num_files = min(MAX_FILES_PER_RANK, 1 + sum(box.num_bytes for box in boxes) // FILE_BYTES)
    groups: list[list[Box]] = [[] for _ in range(num_files)]
    sizes = [0] * num_files
    for box in sorted(boxes, key=lambda box: -box.num_bytes):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(box)
        sizes[smallest] += box.num_bytes
    return [
        FilePlan(f"rank_{rank:05d}" + (f"_{i}" if i else "") + ".safetensors", group)
        for i, group in enumerate(groups)
        if group
    ]


def local_state(state: State, rank: int) -> State:
    """Returns what this rank holds, under names that include the rank, so that it writes all of
    it."""
    return {
        local_name(name, rank): replace(value, like=shard_of(value.like))
        if isinstance(value, PackedTensor)
        else shard_of(value)
        for name, value in state.items()
    }


def local_name(name: str, rank: int) -> str:
    return f"rank_{rank:05d}/{name}"


def gather_boxes(boxes: Sequence[Box], group: dist.ProcessGroup | None) -> list[list[Box]]:
    """Gathers as `gather` does. Boxes are sent as plain lists, which are read several times faster
    than records: a thousand ranks have a million boxes."""
    sent: list[Any] = [[box.name, DTYPE_NAMES[box.dtype], *map(list, box[2:])] for box in boxes]
    return [
        [
            Box(name, DTYPES[dtype], tuple(whole), tuple(start), tuple(shape))
            for name, dtype, whole, start, shape in some
        ]
        for some in gather(sent, group)
    ]


def gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Returns the values of all ranks on rank 0, and an empty list elsewhere."""
    return [value] if group is None else exchange.gather(value, group)


def scatter(values: list[T], group: dist.ProcessGroup | None) -> T:
    return values[0] if group is None else exchange.scatter(values, group)


def broadcast(value: T, group: dist.ProcessGroup | None, source: int = 0) -> T:
    return value if group is None else exchange.broadcast(value, source, group)


def _is_writer(name: str, tensor: Tensor) -> bool:
    """Whether this rank writes its box of a tensor; exactly one of the ranks that hold it does."""
    if not isinstance(tensor, DTensor):
        return True
    copies, number = 1, 0
    place = tensor.device_mesh.get_coordinate()
    assert place is not None
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            size = tensor.device_mesh.size(axis)
            copies, number = copies * size, number * size + place[axis]
    return zlib.crc32(name.encode()) % copies == number
