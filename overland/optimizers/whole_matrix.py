"""Runs whole-matrix rules (rule.py) on the ranks that share a matrix: which of them owns it, and
how they exchange its parts.

    1. every rank runs `before` on its shard and sends the result to the matrix's owner
    2. the owner assembles the matrix, runs `whole`, and sends each rank its part of the result
    3. every rank runs `after` on its shard

This happens in rounds in which every owner has one matrix, so a rank holds one whole matrix at a
time, and a round is two exchanges among the ranks. Ownership follows from names and sizes alone.
Ranks that hold copies (`dp_replicate`) each compute their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from overland.errors import OptimizerError
from overland.optimizers.parameter_shard import ParameterShard, Step, pair, unchanged
from overland.optimizers.rule import WholeMatrix

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Matrix:
    """A matrix and where its parts are."""

    name: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]  # that share it, as global ranks
    boxes: tuple[Box, ...]  # of each of them

    @property
    def sizes(self) -> list[int]:
        return [prod(one.stop - one.start for one in box) for box in self.boxes]


class Matrices:
    """The matrices of this rank, assigned to owners, with the groups to exchange them in."""

    def __init__(self, rule: WholeMatrix, parameters: Mapping[str, nn.Parameter]) -> None:
        self.rule = rule
        shared: dict[tuple[int, ...], list[Matrix]] = {}
        some: dict[tuple[int, ...], nn.Parameter] = {}
        for name, parameter in parameters.items():
            matrix = locate(name, parameter)
            shared.setdefault(matrix.ranks, []).append(matrix)
            some[matrix.ranks] = parameter
        # In an order that all ranks of a group agree on, since they create it together.
        self.groups = [
            (rounds(shared[ranks]), process_group_of(some[ranks], ranks))
            for ranks in sorted(shared)
        ]

    def update(self, shards: Sequence[ParameterShard], step: Step) -> None:
        found = {shard.name: shard for shard in shards}
        for all_rounds, group in self.groups:
            for matrices in all_rounds:
                here = [one if one and one.name in found else None for one in matrices]
                if any(here):
                    self._update(here, found, group, step)

    def _update(
        self,
        matrices: Sequence[Matrix | None],
        shards: Mapping[str, ParameterShard],
        group: dist.ProcessGroup | None,
        step: Step,
    ) -> None:
        """Runs one round: the matrix of each owner, if it has one."""
        inputs = [
            None if matrix is None else self._before(shards[matrix.name], step)
            for matrix in matrices
        ]
        mine = matrices[dist.get_rank(group) if group is not None else 0]
        parts = [0 if one is None else one.numel() for one in inputs]  # of each owner's matrix
        own_parts = mine.sizes if mine is not None else [0] * len(inputs)
        given = torch.cat([one.reshape(-1) for one in inputs if one is not None])
        received, results = exchange(given, parts, own_parts, group), given.new_empty(0)
        if mine is not None:
            whole = self.rule.whole(together(received, mine))
            require_shape(self.rule, "whole", whole, mine.shape)
            results = torch.cat([whole[box].reshape(-1) for box in mine.boxes]).to(given.dtype)
        directions = exchange(results, own_parts, parts, group)
        for matrix, direction in zip(matrices, directions, strict=True):
            if matrix is not None:
                self._after(shards[matrix.name], direction, step)

    def _before(self, shard: ParameterShard, step: Step) -> Tensor:
        kept = shard.wide_state()
        with unchanged(self.rule, "before", *kept.values()):
            found = self.rule.before(shard.wide_gradient(step), kept, shard.rates(step))
        result, state = pair(self.rule, "before", found)
        require_shape(self.rule, "before", result, tuple(shard.gradient.shape))
        shard.write_state(state, step)
        shard.write_scalars(state, step)
        # A skipped step may hold any values, which not every factorisation accepts.
        return torch.where(step.is_skipped, torch.zeros_like(result), result)

    def _after(self, shard: ParameterShard, direction: Tensor, step: Step) -> None:
        parameter, given = shard.wide_parameter(), shard.wide_state()
        direction = direction.view(parameter.shape).to(parameter.dtype)
        with unchanged(self.rule, "after", parameter, *given.values()):
            found = self.rule.after(parameter, direction, given, shard.rates(step))
        new, state = pair(self.rule, "after", found)
        shard.write_parameter(new, step)
        if state is not given:  # most rules update their state before
            shard.write_state(state, step)
            shard.write_scalars(state, step)


def require_shape(rule: WholeMatrix, method: str, result: Tensor, shape: tuple[int, ...]) -> None:
    found = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
    if found != shape:
        raise OptimizerError(
            f"{type(rule).__name__}.{method}() was given {shape} and returned {found}, expected a "
            "tensor of the same shape"
        )


def locate(name: str, parameter: Tensor) -> Matrix:
    """Returns the boxes of all ranks that share a parameter with this one; copies are not
    shared."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Matrix(name, shape, (0,), (tuple(slice(0, size) for size in shape),))
    mesh, placements = parameter.device_mesh, parameter.placements
    place = mesh.get_coordinate()
    assert place is not None
    axes = [
        [place[axis]] if placement.is_replicate() else range(mesh.size(axis))
        for axis, placement in enumerate(placements)
    ]
    boxes, ranks = [], []
    for coordinate in product(*axes):
        local, offset = _compute_local_shape_and_global_offset(
            shape, mesh.shape, list(coordinate), placements
        )
        boxes.append(tuple(slice(a, a + n) for a, n in zip(offset, local, strict=True)))
        ranks.append(int(mesh.mesh[coordinate]))
    return Matrix(name, shape, tuple(ranks), tuple(boxes))


def rounds(matrices: Sequence[Matrix]) -> list[list[Matrix | None]]:
    """Returns the matrix of each owner for each round. The largest are assigned first, always to
    the owner that has the least so far."""
    num_owners = len(matrices[0].ranks)
    dealt: list[list[Matrix]] = [[] for _ in range(num_owners)]
    loads = [0] * num_owners
    for matrix in sorted(matrices, key=lambda one: (-prod(one.shape), one.name)):
        owner = loads.index(min(loads))
        dealt[owner].append(matrix)
        loads[owner] += prod(matrix.shape)
    return [list(some) for some in zip_longest(*dealt)]


def process_group_of(parameter: Tensor, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Returns the group of the ranks that share a parameter; None for one rank. The mesh has the
    group of a single axis; for several axes, these ranks create one without the others."""
    if len(ranks) == 1:
        return None
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    axes = [
        axis
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    ]
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def exchange(
    given: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
) -> list[Tensor]:
    """Exchanges parts of any size, all to all: sends each rank its part of a flat tensor, and
    returns one part from each."""
    taken = given
    if group is not None:
        taken = given.new_empty(sum(received))
        dist.all_to_all_single(taken, given, received, sent, group=group)
    return list(taken.split(received))


def together(parts: Sequence[Tensor], matrix: Matrix) -> Tensor:
    whole = parts[0].new_empty(matrix.shape)
    for part, box in zip(parts, matrix.boxes, strict=True):
        place = whole[box]
        place.copy_(part.view(place.shape))
    return whole
