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

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from overland.errors import ObjectiveError
from overland.models.loss import OutputMatrix
from overland.objectives.objective import Fields, Objective
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
        known_Bk = fields.get(KNOWN)
        if known_Bk is None:
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
        weight_G = of_all.get("weight_B", torch.ones(len(features_G), device=found.device)).to(wide)
        known_Gk = features_G.new_zeros(len(features_G), 1 + len(self.metrics) + found[0].numel())
        if bool((counted := weight_G > 0).any()):  # rows that fill up the last batch do not exist
            of_all.update({name: one[counted] for name, one in of_all.items()})
            with torch.enable_grad():
                rows = features_G[counted].requires_grad_()
                losses, others = self._losses(rows, of_all)
                total = (losses * weight_G[counted]).sum()
            (gradient,) = torch.autograd.grad(total, rows)
            numbers = [losses, *(others[name] for name in self.metrics)]
            logged = torch.stack([one.detach().to(wide) for one in numbers], dim=1)
            logged = logged * weight_G[counted, None]
            known_Gk[counted] = torch.cat([logged, gradient.flatten(1)], dim=1)
        first = 0 if self._mesh is None else self._mesh.dp_rank * len(found)
        return known_Gk[first : first + len(found)]

    def _of_all_ranks(self, mine: Tensor) -> Tensor:
        if self._mesh is None or self._mesh.dp_size == 1:
            return mine
        every = mine.new_empty(len(mine) * self._mesh.dp_size, *mine.shape[1:])
        dist.all_gather_into_tensor(every, mine.contiguous(), self._mesh.axis("dp").get_group())
        return every

    def sums(self, head: OutputMatrix, hidden_BSD: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        raise ObjectiveError(
            f"{type(self).__name__} compares features of rows, but this model's head computes "
            "losses of tokens: let the model call compare() (docs/extending.md)"
        )
