"""The norm of all gradients, by which they are clipped and a step is found not to be finite."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from overland.kernels.norm import sum_of_squares
from overland.optimizers.optimizer import Optimizer
from overland.parallel.apply import ParallelModel
from overland.parallel.comm import sum_over
from overland.parallel.mesh import Mesh
from overland.parallel.sharding import shard_of


def gradient_norm(optimizer: Optimizer, model: ParallelModel, mesh: Mesh) -> Tensor:
    """The 2-norm of all gradients together, over every shard and stage.

    Gradients are grouped by the axes they are sharded over, so that it takes one small sum per
    axis, however many parameters there are.
    """
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for parameter in optimizer.parameters:
        if parameter.grad is not None and model.counted_once(parameter):
            axes = sharded_axes(parameter.grad)
            groups.setdefault(axes, []).append(shard_of(parameter.grad))
    squares = {axes: sum_of_squares(gradients) for axes, gradients in groups.items()}
    for axis in ("fsdp", "tp"):
        together = [axes for axes in squares if axis in axes]
        if together and mesh.parameters[axis].size() > 1:
            summed = torch.stack([squares[axes] for axes in together])
            sum_over(summed, mesh.parameters.get_group(axis))
            squares.update(zip(together, summed, strict=True))
    # A stage whose parameters are all frozen takes part in the sum too.
    total = torch.stack([no_squares(model), *squares.values()]).sum()
    return sum_over(total, mesh.parameters.get_group("pp")).sqrt()


def no_squares(model: ParallelModel) -> Tensor:
    """Zero, in the type and on the device of the sums."""
    some = next(parameter for part in model.parts for parameter in part.parameters())
    wide = torch.promote_types(some.dtype, torch.float32)
    return torch.zeros((), dtype=wide, device=some.device)


def sharded_axes(tensor: Tensor) -> tuple[str, ...]:
    """The mesh axes along which ranks hold different parts."""
    if not isinstance(tensor, DTensor):
        return ()
    axes = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return tuple(name for name, placement in axes if not placement.is_replicate())
