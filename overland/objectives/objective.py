"""What an objective defines (the loss of a sample, what the sum is divided by, passes without
gradients), and the default one, next-token prediction.

The loss of a step is a sum over tokens or samples of the whole global batch, divided by their
number, so gradient accumulation, the split over devices and padding cannot change it:

    count     this rank's share of the divisor, known before any forward pass
    passes    forward passes without gradients that come first; the result of each becomes a field
              of the batch (such as the log-probabilities of a reference model)
    terms     numbers per row, computed from the losses of its tokens, and summed over ranks that
              share a row
    loss      a loss per sample, any function of the terms of its rows, and further metrics to log
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from overland.data.batch import Batch
from overland.data.lanes import IGNORED
from overland.errors import ObjectiveError
from overland.models.loss import OutputMatrix
from overland.parallel.comm import sum_with_own_gradient
from overland.parallel.mesh import Mesh


class Objective:
    """A loss that is any function of the losses of a row's tokens. Override `loss`, and whatever
    else differs."""

    metrics: tuple[str, ...] = ()
    """Names of the metrics that are logged besides the loss, divided by the same count."""
    counts: Literal["tokens", "samples"] = "samples"
    """What the loss is averaged over."""
    rows_per_sample: int = 1
    """Consecutive rows of a batch that belong together, such as the two of a pair."""
    passes: tuple[str, ...] = ()
    """Names of the batch fields that passes without gradients compute, each [rows, terms]."""

    gathers = False
    """Whether the loss compares rows of the whole global batch (see gathered.py)."""
    has_passes = False
    """Whether the current step runs the `passes`."""
    is_precomputed = False
    """Whether the model that a run starts from computes a field for every row before training."""
    keeps_start = False
    """Whether `start` is called with the weights that a run starts from."""

    # Class attributes, so that a user's own __init__ need not know about them.
    _context: Mesh | None = None
    _field: str | None = None
    _found: list[Tensor]

    def count(self, batch: Batch) -> Tensor:
        """Counts this rank's share, which may be fractional if several ranks share a row."""
        if self.counts == "tokens":
            valid_BS, weights_BS = batch["labels_BS"] != IGNORED, weights_of(batch.fields)
            return valid_BS.sum() if weights_BS is None else (valid_BS * weights_BS.double()).sum()
        weight_B = batch.get("weight_B")
        if weight_B is None:
            weight_B = torch.ones(len(batch), device=batch.device)
        return self._sample_weights(weight_B).double().sum() / self._num_sharing

    def terms(self, losses_BS: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Returns [rows, terms]: sums over the tokens of this rank's share of each row, from
        -log p(label) of each token (0 if the label is -100). The channel `weights` has the weight
        of each token."""
        weights_BS = fields.get("weights_BS")
        weighted_BS = losses_BS if weights_BS is None else losses_BS * weights_BS
        return weighted_BS.sum(dim=1, keepdim=True)

    def loss(
        self, terms_Bk: Tensor, fields: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Returns the loss of each sample, and the values of each metric per sample, by the names
        in `metrics`."""
        losses = terms_Bk[:, 0].unflatten(0, (-1, self.rows_per_sample)).sum(dim=1)
        return losses, {}

    def start(self, parts: Sequence[nn.Module]) -> None:
        """Called with the weights that a run starts from, even if it then resumes other weights."""

    def during(self, field: str, parts: Sequence[nn.Module]) -> AbstractContextManager[object]:
        """Returns a context for a pass without gradients, such as one that disables adapters."""
        return nullcontext()

    def completed(self, field: str, found: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Returns the batch field, from what a pass without gradients found for this rank's
        rows."""
        return found

    def sums(self, head: OutputMatrix, hidden_BSD: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Returns the summed loss, followed by the sums of the metrics; called by a model's
        head."""
        fields = Fields(fields)
        fields.objective = type(self).__name__
        losses_BS = head.token_losses(hidden_BSD, fields["labels_BS"])
        num_rows = len(losses_BS)
        terms_Bk = self.terms(losses_BS, fields)
        if not (isinstance(terms_Bk, Tensor) and terms_Bk.ndim == 2 and len(terms_Bk) == num_rows):
            raise self._wrong("terms()", terms_Bk, f"({num_rows}, number of terms)")
        if self._context is not None:
            terms_Bk = sum_with_own_gradient(terms_Bk, self._context.axis("cp").get_group())
        if self._field is not None:
            self._found.append(terms_Bk.detach())
            return terms_Bk.new_zeros(1 + len(self.metrics))
        losses, others = self._losses(terms_Bk, fields)
        weight_B = fields.get("weight_B")
        weight = 1.0 if weight_B is None else self._sample_weights(weight_B)
        total = (losses * weight).sum()
        logged = [(others[name].detach() * weight).sum() for name in self.metrics]
        # Ranks that share rows all have the same loss, and their sums are added up.
        shared = total.detach() / self._num_sharing + (total - total.detach())
        return torch.stack([shared, *(one / self._num_sharing for one in logged)])

    def _losses(
        self, terms_Bk: Tensor, fields: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Calls `loss` and checks that it returns a number per sample: with a mean, for example,
        the result would depend on how the batch is split."""
        returned = self.loss(terms_Bk, fields)
        if not (isinstance(returned, tuple) and len(returned) == 2):
            raise ObjectiveError(
                f"{type(self).__name__}.loss() must return two things: a loss per sample, and a "
                "dict of further metrics"
            )
        losses, others = returned
        found = {"loss()": losses}
        for name in self.metrics:
            if name not in others:
                raise ObjectiveError(
                    f"{type(self).__name__}.metrics lists '{name}', but loss() does not return it"
                )
            found[f"loss() as its metric {name}"] = others[name]
        shape = (len(terms_Bk) // self.rows_per_sample,)
        for what, one in found.items():
            if not isinstance(one, Tensor) or tuple(one.shape) != shape:
                raise self._wrong(what, one, f"{shape}, a number per sample")
        if terms_Bk.requires_grad and not losses.requires_grad:
            raise ObjectiveError(
                f"{type(self).__name__}.loss() has no gradient: its losses do not depend on the "
                "terms, or only through an operation that is not differentiable"
            )
        return losses, others

    def _wrong(self, what: str, found: object, expected: str) -> ObjectiveError:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        return ObjectiveError(
            f"{type(self).__name__} returned {shape} from {what}; expected a tensor of shape "
            f"{expected}"
        )

    def _sample_weights(self, weight_B: Tensor) -> Tensor:
        """Gives a sample the smallest weight of its rows: half a pair does not count."""
        return weight_B.unflatten(0, (-1, self.rows_per_sample)).amin(dim=1)

    def bind(self, mesh: Mesh) -> None:
        """Tells the objective which ranks share rows with this one."""
        self._context = mesh if mesh.degrees.cp > 1 else None

    def row_by_row(self) -> AbstractContextManager[object]:
        """Returns a context in which the loss is a sum over rows if the model treats each row by
        itself. Most objectives need none, since their loss is to be one."""
        return nullcontext()

    @contextmanager
    def finding(self, field: str) -> Iterator[list[Tensor]]:
        """Collects the terms of forward passes in the list, on ranks that have the head."""
        self._field, self._found = field, []
        try:
            yield self._found
        finally:
            self._field = None

    @property
    def _num_sharing(self) -> int:
        return 1 if self._context is None else self._context.degrees.cp


def count_of(objective: Objective, batch: Batch) -> Tensor:
    """Returns the objective's count of this rank's share, and checks that it is a number."""
    name = type(objective).__name__
    try:
        count = objective.count(batch)
    except KeyError as error:
        raise ObjectiveError(
            f"{name}.count() needs the field {error.args[0]}, which the batch does not have; it "
            f"has {', '.join(batch.fields)}"
        ) from None
    if not isinstance(count, Tensor) or count.ndim:
        shape = tuple(count.shape) if isinstance(count, Tensor) else type(count).__name__
        raise ObjectiveError(
            f"{name}.count() returned {shape}; expected a tensor without dimensions"
        )
    return count


class Fields(dict[str, Tensor]):
    """The fields of a batch, with a clear error if an objective needs one that the data lacks."""

    objective = ""

    def __missing__(self, name: str) -> Tensor:
        raise ObjectiveError(
            f"{self.objective} needs the field {name}, which the batch does not have; it has "
            f"{', '.join(self)}"
        )


def weights_of(fields: Mapping[str, Tensor]) -> Tensor | None:
    """Returns the weight of each token, or None if all count the same."""
    weights_BS, weight_B = fields.get("weights_BS"), fields.get("weight_B")
    if weight_B is None:
        return weights_BS
    rows_B1 = weight_B[:, None]
    return rows_B1.expand_as(fields["labels_BS"]) if weights_BS is None else weights_BS * rows_B1


class NextToken(Objective):
    """Next-token prediction: cross-entropy and, if enabled, z-loss: z · log²Z per token, which
    keeps the logits from drifting (Chowdhery et al. 2022).

    It is a weighted sum of token losses, so the head can compute its gradient in the forward pass.
    The field `weights_BS` has the weight of each token.
    """

    counts = "tokens"

    def __init__(self, z_loss: float = 0.0) -> None:
        self.z_loss = z_loss
        self.metrics = ("cross_entropy", "z_loss") if z_loss else ()

    def sums(self, head: OutputMatrix, hidden_BSD: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        # Validation reports only the cross-entropy.
        z_loss = self.z_loss if torch.is_grad_enabled() else 0.0
        total, z_part = head.weighted_sum(
            hidden_BSD, fields["labels_BS"], weights_of(fields), z_loss
        )
        if not self.metrics:
            return total
        return torch.stack([total, total.detach() - z_part, z_part])
