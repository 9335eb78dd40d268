"""Who writes what: made once per run, since a run's tensors do not change.

PyTorch's DCP planner says which box of which tensor each rank holds, and leaves every box to one
rank, spread evenly, when several hold it. We lay the boxes out in files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from overland.checkpoint.format import header_of, name_of_part

# One file is written by one thread at a time in most file systems, so a rank with much to write
# spreads it over a few.
MAX_FILES_PER_RANK = 4
FILE_BYTES = 2**30

T = TypeVar("T")


@dataclass(frozen=True)
class Packed:
    """A tensor that its owner keeps in other ones, element by element: they are copied to the host
    as they are, and `unpack` makes of them there what is saved."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: tuple[Tensor, ...]
    unpack: Callable[..., Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.kept)


State = Mapping[str, Tensor | Packed]


@dataclass(frozen=True)
class Box:
    """A part of a tensor that one rank writes."""

    name: str
    dtype: torch.dtype
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FilePlan:
    name: str
    header: bytes
    boxes: list[Box]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(box.num_bytes for box in self.boxes)

    def offsets(self) -> list[int]:
        """Where each box begins."""
        offsets, position = [], len(self.header)
        for box in self.boxes:
            offsets.append(position)
            position += box.num_bytes
        return offsets


@dataclass(frozen=True)
class Plan:
    """This rank's files; rank 0 also has everyone's, because it writes the index."""

    files: list[FilePlan]
    files_of_ranks: list[list[FilePlan]]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def plan_save(state: State, group: dist.ProcessGroup | None) -> Plan:
    """All ranks together. `group` is None for a process that is alone."""
    rank = dist.get_rank(group) if group else 0
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(
        {name: _shaped(value) for name, value in state.items()}, is_coordinator=rank == 0
    )
    local_plans = gather(planner.create_local_plan(), group)
    plans: list[SavePlan] = []
    if rank == 0:
        plans, _ = planner.create_global_plan(local_plans)
    boxes_of_ranks = [boxes_of(plan) for plan in plans]
    boxes = scatter(boxes_of_ranks, group)
    files_of_ranks = [lay_out(boxes, r) for r, boxes in enumerate(boxes_of_ranks)]
    return Plan(lay_out(boxes, rank), files_of_ranks)


def plan_local_save(state: State, group: dist.ProcessGroup | None) -> Plan:
    """Each rank writes what it holds (see `local_state`); nothing is shared out."""
    rank = dist.get_rank(group) if group else 0
    boxes = []
    for name, value in state.items():
        shape = tuple(value.shape)
        boxes.append(Box(name, value.dtype, shape, (0,) * len(shape), shape))
    boxes_of_ranks = gather(boxes, group)
    return Plan(lay_out(boxes, rank), [lay_out(b, r) for r, b in enumerate(boxes_of_ranks)])


def lay_out(boxes: Sequence[Box], rank: int) -> list[FilePlan]:
    """Files of about equal size; boxes without elements need no place."""
    boxes = [box for box in boxes if box.num_bytes]
    total = sum(box.num_bytes for box in boxes)
    num_files = min(MAX_FILES_PER_RANK, 1 + total // FILE_BYTES)
    groups: list[list[Box]] = [[] for _ in range(num_files)]
    sizes = [0] * num_files
    for box in sorted(boxes, key=lambda box: -box.num_bytes):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(box)
        sizes[smallest] += box.num_bytes
    files = []
    for i, group in enumerate(groups):
        if group:
            name = f"rank_{rank:05d}" + (f"_{i}" if i else "") + ".safetensors"
            header = header_of(
                (name_of_part(box.name, box.start, box.shape, box.whole), box.dtype, box.shape)
                for box in group
            )
            files.append(FilePlan(name, header, group))
    return files


def boxes_of(plan: SavePlan) -> list[Box]:
    boxes = []
    for item in plan.items:
        data = item.tensor_data
        assert data is not None, item.index.fqn
        start, shape = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        dtype = data.properties.dtype
        boxes.append(Box(item.index.fqn, dtype, tuple(data.size), start, shape))
    return boxes


def local_state(state: State, rank: int) -> State:
    """What this rank holds, under names of its own."""
    return {
        local_name(name, rank): value if isinstance(value, Packed) else local_tensor(value)
        for name, value in state.items()
    }


def local_name(name: str, rank: int) -> str:
    return f"rank_{rank:05d}/{name}"


def local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shaped(value: Tensor | Packed) -> Tensor:
    """Something to plan with."""
    if isinstance(value, Packed):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value


def gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Everyone's value on rank 0; nothing elsewhere."""
    if group is None:
        return [value]
    if dist.get_rank(group):
        dist.gather_object(value, dst=0, group=group)
        return []
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.gather_object(value, values, dst=0, group=group)
    return values  # type: ignore[return-value]


def scatter(values: list[T], group: dist.ProcessGroup | None) -> T:
    if group is None:
        return values[0]
    mine: list[T | None] = [None]
    dist.scatter_object_list(mine, values or None, src=0, group=group)
    return mine[0]  # type: ignore[return-value]


def broadcast(value: T, group: dist.ProcessGroup | None) -> T:
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]
