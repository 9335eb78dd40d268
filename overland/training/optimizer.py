"""AdamW, clipped and skipped without asking the host.

The fused kernel takes two extra numbers: a divisor for the gradients, and a flag that turns the
whole update into nothing. Clipping, the loss scale and "this step is not finite" all go through
these, so no extra pass over the gradients is made, and the loop never waits to learn whether a step
was good.

The kernel is called on the shards themselves. An update is elementwise, so it need not know of any
layout; going through DTensor costs a second per call the first time and milliseconds ever after.
On one device parameters are split into halves (see parallel/single.py) and have a kernel of our
own, which does the same arithmetic, as shards have with `optimizer.bf16_moments`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overland.config.schema import Optimizer
from overland.kernels.adamw import Rates, UpdateState, update, update_whole
from overland.kernels.norm import sum_of_squares
from overland.parallel.apply import ParallelModel
from overland.parallel.comm import sum_over
from overland.parallel.mesh import Mesh
from overland.parallel.parts import parameter_names, shard_of
from overland.parallel.single import Masters


@dataclass
class Moments:
    """Running means of a parameter's gradient and of its square, placed as the parameter is."""

    exp_avg: Tensor
    exp_avg_sq: Tensor


class AdamW:
    """Matrices and embeddings decay; norms and biases (anything with one dimension) do not."""

    def __init__(self, parts: Sequence[nn.Module], settings: Optimizer) -> None:
        self.settings = settings
        self.parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
        self.moments = {p: self._no_moments(p) for p in self.parameters}
        # By name: both ends of a tied matrix must be rounded alike, wherever they are.
        names = parameter_names(parts)
        self._numbers = {p: crc32(names[p].encode()) >> 1 for p in self.parameters}
        some = next(iter(names))  # trained or not: a stage's parameters may all be frozen
        self.num_updates = torch.zeros((), device=some.device)
        wide = torch.promote_types(some.dtype, torch.float32)
        self.no_squares = torch.zeros((), dtype=wide, device=some.device)
        self.masters = Masters(parts)

    def _no_moments(self, parameter: nn.Parameter) -> Moments:
        dtype = torch.bfloat16 if self.settings.bf16_moments else parameter.dtype
        like = parameter.detach()
        return Moments(torch.zeros_like(like, dtype=dtype), torch.zeros_like(like, dtype=dtype))

    def update(
        self,
        learning_rate: float,
        norm: Tensor,
        max_norm: float,
        loss_scale: Tensor,
        skip: Tensor,
    ) -> None:
        """One step with gradients divided by the loss scale and clipped; `skip` leaves all as is.

        `norm` is the norm of the gradients without their loss scale.
        """
        divisor = loss_scale
        if max_norm > 0:
            divisor = loss_scale * (norm / max_norm).clamp(min=1.0)
        home = self.num_updates.device  # host memory, if the parameters are offloaded
        divisor, skip = divisor.to(home, torch.float32), skip.to(home, torch.float32)
        self.num_updates += 1
        for decays in (True, False):
            self._update_group(decays, learning_rate, divisor, skip)
        self.num_updates -= skip
        for parameter in self.parameters:
            parameter.grad = None

    def _update_group(self, decays: bool, rate: float, divisor: Tensor, skip: Tensor) -> None:
        settings = self.settings
        decay = settings.weight_decay if decays else 0.0
        decoupled = settings.name == "AdamW"
        rates = Rates(rate, settings.beta1, settings.beta2, settings.eps, decay, decoupled)
        states = [
            self._update_state(parameter)
            for parameter in self.parameters
            if parameter.grad is not None and (parameter.ndim >= 2) == decays
        ]
        if self.masters.rests or settings.bf16_moments:
            update(states, self.num_updates, rates, divisor, skip)
        elif states := [state for state in states if state.parameter.numel()]:
            update_whole(
                [state.parameter for state in states],
                [state.gradient for state in states],
                [state.exp_avg for state in states],
                [state.exp_avg_sq for state in states],
                self.num_updates,
                rates,
                divisor,
                skip,
            )

    def _update_state(self, parameter: nn.Parameter) -> UpdateState:
        assert parameter.grad is not None
        moments = self.moments[parameter]
        return UpdateState(
            shard_of(parameter.detach()),
            self.masters.rests.get(parameter),
            shard_of(parameter.grad),
            shard_of(moments.exp_avg),
            shard_of(moments.exp_avg_sq),
            self._numbers[parameter],
        )


def gradient_norm(optimizer: AdamW, model: ParallelModel, mesh: Mesh) -> Tensor:
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
    total = torch.stack([optimizer.no_squares, *squares.values()]).sum()
    return sum_over(total, mesh.parameters.get_group("pp")).sqrt()


def sharded_axes(tensor: Tensor) -> tuple[str, ...]:
    """The mesh axes along which ranks hold different parts."""
    if not isinstance(tensor, DTensor):
        return ()
    axes = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return tuple(name for name, placement in axes if not placement.is_replicate())
