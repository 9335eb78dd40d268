"""The protocol of objectives.

The loss of a step is a sum over tokens or samples of the whole global batch, divided by their
number. So neither accumulation, nor the split over devices, nor padding can change it:

    count     this rank's share of what the sum is divided by, known before any forward pass
    passes    forward passes without gradient that come first; what each finds becomes a field of
              the batch (the log-probabilities of a reference, say)
    terms     numbers per row, made of the losses of its tokens; summed over ranks that share a row
    loss      a loss per sample, made of the terms of its rows by any function, and what else is
              logged
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from overland.data.batch import IGNORED, Batch
from overland.models.loss import OutputMatrix
from overland.parallel.comm import sum_with_own_gradient
from overland.parallel.mesh import Mesh


class Objective:
    """A loss that is any function of the losses of a row's tokens. Override `loss`, and what else
    differs."""

    metrics: tuple[str, ...] = ()
    """Names of what is logged beside the loss, divided by the same count."""
    counts: Literal["tokens", "samples"] = "samples"
    """What the loss is a mean over."""
    rows_per_sample: int = 1
    """Consecutive rows of a batch that belong together, such as the two of a pair."""
    passes: tuple[str, ...] = ()
    """Names of the batch fields that forward passes without gradient make, [rows, terms] each."""

    def __init__(self) -> None:
        self._context: Mesh | None = None
        self._field: str | None = None
        self._found: list[Tensor] = []

    def count(self, batch: Batch) -> Tensor:
        """This rank's share; what is not a whole number is a share of a row that ranks share."""
        if self.counts == "tokens":
            valid_BS = batch["labels_BS"] != IGNORED
            weight_B = batch.get("weight_B")
            return valid_BS.sum() if weight_B is None else (valid_BS * weight_B[:, None]).sum()
        weight_B = batch.get("weight_B")
        rows = torch.as_tensor(float(len(batch)), dtype=torch.float64, device=batch.device)
        rows = rows if weight_B is None else weight_B.double().sum()
        return rows / (self.rows_per_sample * self._num_sharing)

    def terms(self, losses_BS: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """[rows, terms]: sums over the tokens of this rank's share of each row, from
        -log p(label) of each token (0 where the label is -100)."""
        return losses_BS.sum(dim=1, keepdim=True)

    def loss(
        self, terms_Bk: Tensor, fields: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of each sample, and of each what else is logged, by the names in `metrics`."""
        losses = terms_Bk[:, 0].unflatten(0, (-1, self.rows_per_sample)).sum(dim=1)
        return losses, {}

    def during(self, field: str, parts: Sequence[nn.Module]) -> AbstractContextManager[object]:
        """What holds during a pass without gradient, such as adapters that are switched off."""
        return nullcontext()

    def sums(self, head: OutputMatrix, hidden_BSD: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Called by a model's head: the summed loss, followed by the sums of the metrics."""
        losses_BS = head.token_losses(hidden_BSD, fields["labels_BS"])
        terms_Bk = self.terms(losses_BS, fields)
        if self._context is not None:
            terms_Bk = sum_with_own_gradient(terms_Bk, self._context.axis("cp").get_group())
        if self._field is not None:
            self._found.append(terms_Bk.detach())
            return terms_Bk.new_zeros(1 + len(self.metrics))
        losses, others = self.loss(terms_Bk, fields)
        weight_B = fields.get("weight_B")
        weight = 1.0 if weight_B is None else weight_B[:: self.rows_per_sample]
        total = (losses * weight).sum()
        logged = [(others[name].detach() * weight).sum() for name in self.metrics]
        # Ranks that share rows have the same loss each, and their sums are added up.
        shared = total.detach() / self._num_sharing + (total - total.detach())
        return torch.stack([shared, *(one / self._num_sharing for one in logged)])

    def bind(self, mesh: Mesh) -> None:
        """Tells the objective who shares rows with this rank."""
        self._context = mesh if mesh.degrees.cp > 1 else None

    @contextmanager
    def finding(self, field: str) -> Iterator[list[Tensor]]:
        """Inside, forward passes put their terms into the list, where this rank has the head."""
        self._field, self._found = field, []
        try:
            yield self._found
        finally:
            self._field = None

    @property
    def _num_sharing(self) -> int:
        return 1 if self._context is None else self._context.degrees.cp
