"""Objectives that compare rows with each other, such as a contrastive loss over the global batch.

Rows are split over data ranks and micro-batches, and such a loss is not a sum over them. But it
depends on the model only through some numbers per row, the features. So its gradient is exact in
every split (Gao et al. 2021, GradCache):

    1. a pass without gradients computes the features of this rank's rows
    2. every rank gathers those of all ranks, and computes the loss of the global batch and its
       gradient with respect to each feature
    3. a pass with gradients continues from there: that of features · (gradient of step 2)

Step 1 is left out if a rank takes all of its rows in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from overland.errors import ObjectiveError
from overland.models.loss import OutputMatrix
from overland.objectives.objective import Fields, Objective
from overland.parallel.comm import gather
from overland.parallel.mesh import Mesh

KNOWN = "known_Bk"


class Gathered(Objective):
    """A loss that is any function of the features of all rows. Override `loss`, which is given the
    features of the whole global batch and returns a loss for each of its rows. The model calls
    `compare`."""

    gathers = True
    passes = (KNOWN,)
    fields: tuple[str, ...] = ()
    """Names of the batch fields that `loss` is given for all rows, such as labels."""
    _mesh: Mesh | None = None
    _is_apart = False

    def bind(self, mesh: Mesh) -> None:
        if mesh.degrees.cp > 1:
            raise ObjectiveError(
                f"{type(self).__name__} compares whole rows, but cp = {mesh.degrees.cp} splits "
                "them: train without context parallelism"
            )
        self._mesh = mesh

    def compare(self, features_B: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Returns this pass's share of the loss and of the metrics, from the features of its rows:
        a tensor of any shape with the rows in front. `fields` are those of the batch."""
        if self._field is not None:
            self._found.append(features_B.detach())
            return features_B.new_zeros(1 + len(self.metrics))
        if self._is_apart:
            return self._without_comparison(features_B)
        known_Bk = fields.get(KNOWN)
        if known_Bk is None:
            if self.has_passes:
                raise ObjectiveError(
                    f"{type(self).__name__}.compare() was not given {KNOWN}: pass it all fields "
                    "of the batch that forward() does not name itself (**fields)"
                )
            known_Bk = self.completed(KNOWN, features_B.detach(), fields)
        count = 1 + len(self.metrics)
        gradient_Bk, sums = known_Bk[:, count:], known_Bk[:, :count].sum(dim=0)
        toward = (features_B.flatten(1).to(gradient_Bk.dtype) * gradient_Bk).sum()
        return torch.cat([sums[:1] + (toward - toward.detach()), sums[1:]])

    def completed(self, field: str, found: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Returns for each of this rank's rows its loss, its metrics, and the gradient of the loss
        of the global batch with respect to its features."""
        wide = torch.promote_types(found.dtype, torch.float32)
        features_G = self._of_all_ranks(found.detach().to(wide))
        given = Fields(fields)
        given.objective = type(self).__name__
        names = [*self.fields, *({"weight_B"} & fields.keys())]
        of_all = Fields({name: self._of_all_ranks(given[name]) for name in names})
        of_all.objective = given.objective
        known_Gk = features_G.new_zeros(len(features_G), 1 + len(self.metrics) + found[0].numel())
        if "weight_B" not in of_all:
            known_Gk = self._known(features_G, of_all)
        elif bool((counted := of_all["weight_B"] > 0).any()):
            # Rows that fill up the last batch do not exist.
            of_all.update({name: one[counted] for name, one in of_all.items()})
            known_Gk[counted] = self._known(features_G[counted], of_all)
        first = 0 if self._mesh is None else self._mesh.dp_rank * len(found)
        return known_Gk[first : first + len(found)]

    def _known(self, features_G: Tensor, fields: Fields) -> Tensor:
        weight_G1 = fields.get("weight_B", features_G.new_ones(len(features_G)))[:, None]
        with torch.enable_grad():
            rows = features_G.detach().requires_grad_()
            losses, others = self._losses(rows, fields)
            total = (losses * weight_G1[:, 0]).sum()
        (gradient,) = torch.autograd.grad(total, rows)
        numbers = [losses, *(others[name] for name in self.metrics)]
        logged = torch.stack([one.detach().to(features_G.dtype) for one in numbers], dim=1)
        return torch.cat([logged * weight_G1, gradient.flatten(1)], dim=1)

    def _without_comparison(self, features_B: Tensor) -> Tensor:
        """Returns a sum that mixes the features of each row, and of no two rows."""
        each_Bk = features_B.flatten(1)
        by_k = torch.arange(1, each_Bk.shape[1] + 1, device=each_Bk.device).sin()
        total = (each_Bk + by_k.to(each_Bk.dtype)).square().sum().reshape(1)
        return torch.cat([total, total.new_zeros(len(self.metrics))])

    @contextmanager
    def row_by_row(self) -> Iterator[None]:
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    def _of_all_ranks(self, mine: Tensor) -> Tensor:
        if self._mesh is None or self._mesh.dp_size == 1:
            return mine
        return gather(mine.contiguous(), 0, self._mesh.axis("dp").get_group())

    def sums(self, head: OutputMatrix, hidden_BSD: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        raise ObjectiveError(
            f"{type(self).__name__} compares features of rows, but this model's head computes "
            "losses of tokens: let the model call compare() (docs/extending.md)"
        )
