"""The losses of preference tuning (DPO, IPO, ORPO, SimPO), which make the chosen one of two answers
to a prompt likelier than the rejected.

A row holds a pair, each answer with its prompt, and neither attends to the other (see
data/learned_tokens.py). With c and r the log-probabilities of the two answers, c' and r' those
under a frozen reference model, and ⟨ ⟩ the mean over tokens:

    dpo     -log σ(β · ((c - c') - (r - r')))            Rafailov et al. 2023
    ipo     ((⟨c - c'⟩ - ⟨r - r'⟩) - 1/2β)²              Azar et al. 2023
    orpo    -⟨c⟩ - β · log σ(odds⟨c⟩ - odds⟨r⟩)          Hong et al. 2024; odds p = p - log(1 - eᵖ)
    simpo   -log σ(β · (⟨c⟩ - ⟨r⟩) - γ)                  Meng et al. 2024

The loss of a step is the mean over its pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overland.config.derived import COMPARED
from overland.config.schema import Preference
from overland.data.shard import CHOSEN, REJECTED
from overland.models.lora import without_adapters
from overland.objectives.objective import Objective
from overland.parallel.sharding import shard_of

REFERENCE = "reference_Bk"


class PreferenceLoss(Objective):
    metrics = ("rewards_chosen", "rewards_rejected", "rewards_margins", "rewards_accuracies",
               "logps_chosen", "logps_rejected")  # fmt: skip

    def __init__(self, settings: Preference, starts_as_base: bool) -> None:
        """`starts_as_base`: without its adapters, the model is always the one it started from."""
        self.settings = settings
        reference = settings.reference
        if reference == "auto":
            reference = "adapter_off" if starts_as_base else "copy"
        compares = settings.loss in COMPARED
        self.keeps_start = compares and reference == "copy"
        self.is_precomputed = compares and reference == "precomputed"
        if compares and not self.is_precomputed:
            self.passes = (REFERENCE,)
        self._others: dict[nn.Parameter, Tensor] = {}  # of the reference, while it is not in use

    def terms(self, losses_BS: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Returns the log-probabilities of both answers, and their numbers of tokens."""
        answers_BS, weights_BS = fields["answers_BS"], fields["weights_BS"].to(losses_BS.dtype)
        sides = [(answers_BS == side) * weights_BS for side in (CHOSEN, REJECTED)]
        sums = [-(losses_BS * side_BS).sum(dim=1) for side_BS in sides]
        return torch.stack([*sums, *(side_BS.sum(dim=1) for side_BS in sides)], dim=1)

    def loss(
        self, terms_Bk: Tensor, fields: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        settings = self.settings
        chosen, rejected, num_chosen, num_rejected = terms_Bk.unbind(dim=1)
        num_chosen, num_rejected = num_chosen.clamp(min=1), num_rejected.clamp(min=1)
        beta, ratio_c, ratio_r = settings.beta, chosen, rejected
        if settings.loss in COMPARED:
            ratio_c = chosen - fields[REFERENCE][:, 0]
            ratio_r = rejected - fields[REFERENCE][:, 1]
        else:  # per token
            ratio_c, ratio_r = chosen / num_chosen, rejected / num_rejected
        if settings.loss == "dpo":
            margin, flipped = beta * (ratio_c - ratio_r), settings.label_smoothing
            losses = -(1 - flipped) * F.logsigmoid(margin) - flipped * F.logsigmoid(-margin)
        elif settings.loss == "ipo":
            losses = (ratio_c / num_chosen - ratio_r / num_rejected - 0.5 / beta).square()
        elif settings.loss == "simpo":
            losses = -F.logsigmoid(beta * (ratio_c - ratio_r) - settings.simpo_gamma)
        else:
            odds = (ratio_c - log_complement(ratio_c)) - (ratio_r - log_complement(ratio_r))
            losses = -ratio_c - beta * F.logsigmoid(odds)
        reward_c, reward_r = beta * ratio_c, beta * ratio_r
        return losses, {
            "rewards_chosen": reward_c,
            "rewards_rejected": reward_r,
            "rewards_margins": reward_c - reward_r,
            "rewards_accuracies": (reward_c > reward_r).to(losses.dtype),
            "logps_chosen": chosen,
            "logps_rejected": rejected,
        }

    def start(self, parts: Sequence[nn.Module]) -> None:
        self._others = {
            parameter: shard_of(parameter.detach()).clone()
            for part in parts
            for parameter in part.parameters()
            if parameter.requires_grad
        }

    def during(self, field: str, parts: Sequence[nn.Module]) -> AbstractContextManager[object]:
        return self._in_place() if self.keeps_start else without_adapters(parts)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        """Swaps the values of the parameters with those of the copy."""
        for parameter, other in self._others.items():
            here = shard_of(parameter.detach())
            kept = here.clone()
            here.copy_(other)
            other.copy_(kept)


def log_complement(log_p: Tensor) -> Tensor:
    """Returns log(1 - eˣ) for x < 0, accurate near both ends."""
    near_one = log_p > -0.6931
    a = torch.log(-torch.expm1(log_p.where(near_one, -1.0).clamp(max=-1e-12)))
    b = torch.log1p(-torch.exp(log_p.where(~near_one, -1.0)))
    return torch.where(near_one, a, b)
