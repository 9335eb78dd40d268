"""Gradient accumulation: micro-batches pass one after the other through a model that is not split
into stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overland.data.batch import Batch
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
        sums: Tensor = self.parts[0](first, **others)
        return sums

    def look(self, batch: Batch) -> None:
        """Runs forward passes without gradients, for an objective that records results."""
        for micro in batch.split(self.rows_per_pass):
            self.loss(micro)

    def counted_once(self, parameter: nn.Parameter) -> bool:
        return True
