"""Gradient accumulation: micro-batches pass one after the other through a model that is not split
into stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overland.data.batch import Batch
from overland.errors import ModelError
from overland.models.structure import Inputs
from overland.parallel.sharding import sync_gradients


class Whole:
    """A model that is not split into stages; it has the methods of `Pipeline`."""

    def __init__(self, model: nn.Module, rows_per_pass: int, num_sums: int = 1) -> None:
        self.parts = [model]
        self.rows_per_pass = rows_per_pass
        self.num_sums = num_sums
        self._inputs = Inputs(model)

    def loss_and_gradients(self, batch: Batch, scale: Tensor) -> Tensor:
        """Returns the summed loss times `scale`, and the objective's other sums; leaves the
        gradients, accumulated over micro-batches, in the parameters."""
        total = torch.zeros(self.num_sums, dtype=torch.float64, device=batch.device)
        micro_batches = list(batch.split(self.rows_per_pass))
        for number, micro in enumerate(micro_batches, start=1):
            sync_gradients(self.parts[0], last=number == len(micro_batches))
            sums = self.loss(micro) * scale
            (sums if sums.ndim == 0 else sums[0]).backward()
            total += sums.detach()
        return total

    def loss(self, batch: Batch) -> Tensor:
        """Returns the summed loss, alone or followed by the objective's other sums."""
        first, others = self._inputs.of(batch.fields)
        return checked_sums(self.parts[0](first, **others), self.num_sums, self._inputs.model)

    def forward_only(self, batch: Batch) -> None:
        """Runs forward passes without gradients, for an objective that records results."""
        for micro in batch.split(self.rows_per_pass):
            self.loss(micro)

    def counted_once(self, parameter: nn.Parameter) -> bool:
        return True


def checked_sums(returned: object, num_sums: int, model: str) -> Tensor:
    """Returns what a model returned, or raises if that is not the sums of a pass."""
    shapes = [(num_sums,)] if num_sums > 1 else [(), (1,)]
    if isinstance(returned, Tensor) and tuple(returned.shape) in shapes:
        return returned
    what = f"a {type(returned).__name__}"
    if isinstance(returned, Tensor):
        what = f"a tensor of shape {tuple(returned.shape)}"
    expected = "the sum of its loss, a single number"
    if num_sums > 1:
        expected = f"the sums of its loss and metrics, a tensor of shape ({num_sums},)"
    raise ModelError(
        f"forward() of {model.removeprefix('FSDP')} returned {what}, expected {expected} "
        "(docs/extending.md)"
    )
