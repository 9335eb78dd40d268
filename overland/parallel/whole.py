"""A model that is not cut into stages: micro-batches go through it one after the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overland.data.batch import Batch
from overland.parallel.shard import sync_gradients


class Whole:
    """The counterpart of `Pipeline`, with the same methods."""

    def __init__(self, model: nn.Module, rows_per_pass: int) -> None:
        self.parts = [model]
        self.rows_per_pass = rows_per_pass

    def loss_and_gradients(self, batch: Batch, scale: Tensor) -> Tensor:
        """The summed loss times `scale`; gradients are left in the parameters."""
        total = torch.zeros((), dtype=torch.float64, device=batch.device)
        micro_batches = list(batch.split(self.rows_per_pass))
        for number, micro in enumerate(micro_batches, start=1):
            sync_gradients(self.parts[0], last=number == len(micro_batches))
            loss = self.loss(micro) * scale
            loss.backward()
            total += loss.detach()
        return total

    def loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self.parts[0](
            batch["tokens_BS"],
            positions_BS=batch.get("positions_BS"),
            documents_BS=batch.get("documents_BS"),
            labels_BS=batch["labels_BS"],
        )
        return loss

    def counted_once(self, parameter: nn.Parameter) -> bool:
        return True
