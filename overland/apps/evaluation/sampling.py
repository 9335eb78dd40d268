"""Chooses the next token from logits, on their device: greedy, temperature, top-k, top-p, min-p,
repetition penalty.

The order and meaning of the settings are those of transformers: the repetition penalty first; then,
unless decoding is greedy, temperature, top-k, top-p and min-p.

A sample is a pure function of the seed, the number of the prompt, the position and the token; it
does not depend on the batch or the device. Each token gets noise from a Gumbel distribution, and
the largest sum of logit and noise wins (the Gumbel-max trick), which samples tokens with their
probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from overland.errors import ModelError
from overland.models.draws import hash_bits, keys_of

# Below this, temperature counts as 0: float32 logits are not that precise, and dividing by less may
# overflow float32.
LEAST_TEMPERATURE = 1e-6
BROKEN = -1  # returned instead of a token if logits are not finite


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled; greedy by default."""

    temperature: float = 0.0
    """0: the most likely token."""
    top_k: int = 0
    """Sample from this many of the most likely tokens; 0: all."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose probabilities add up to this; 1: all."""
    min_p: float = 0.0
    """Sample from tokens whose probability is at least this fraction of the highest; 0: all."""
    repetition_penalty: float = 1.0
    """Divides positive logits (and multiplies negative ones) of tokens that occurred before."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, is_valid, wanted in (
            ("temperature", 0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "more than 0"),
        ):
            if not is_valid:
                option = name.replace("_", "-")
                raise ModelError(f"--{option} {getattr(self, name)}: expected {wanted}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE


GREEDY = Sampling()


def row_keys(seed: int, numbers: Iterable[int], device: torch.device) -> Tensor:
    """Returns the random keys of each row: [2, rows]."""
    keys = [keys_of(f"{seed}/{number}") for number in numbers]
    return torch.tensor(keys, device=device).t().contiguous()


def choose(
    logits_BV: Tensor,
    sampling: Sampling,
    keys_2B: Tensor,
    positions_B: Tensor,
    seen_BV: Tensor | None = None,
) -> Tensor:
    """Returns the next token of each row, or BROKEN if its largest logit is NaN or infinite; -inf
    rules out a token. `seen_BV`: which tokens occurred before, if that matters."""
    scores_BV = scored(logits_BV, sampling, seen_BV)
    if not sampling.is_greedy:
        scores_BV = scores_BV + gumbel(keys_2B, positions_B, scores_BV.shape[1])
    chosen_B = scores_BV.argmax(dim=-1)  # NaN counts as the largest
    is_number_B = logits_BV.gather(1, chosen_B[:, None])[:, 0].isfinite()
    return torch.where(is_number_B, chosen_B, BROKEN)


def scored(logits_BV: Tensor, sampling: Sampling, seen_BV: Tensor | None = None) -> Tensor:
    """Returns the logits of the tokens that may be chosen, and -inf for the others."""
    if not sampling.is_greedy or sampling.repetition_penalty != 1:
        logits_BV = logits_BV.float()
    if sampling.repetition_penalty != 1 and seen_BV is not None:
        by = sampling.repetition_penalty
        less_BV = torch.where(logits_BV < 0, logits_BV * by, logits_BV / by)
        logits_BV = torch.where(seen_BV, less_BV, logits_BV)
    if sampling.is_greedy:
        return logits_BV
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k:
        at_most = min(sampling.top_k, logits_BV.shape[1])
        least_B1 = torch.topk(logits_BV, at_most).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -math.inf)
    if sampling.top_p < 1:
        logits_BV = _likeliest(logits_BV, sampling.top_p)
    if sampling.min_p > 0:
        least_B1 = logits_BV.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -math.inf)
    return logits_BV


def _likeliest(logits_BV: Tensor, top_p: float) -> Tensor:
    """Keeps the most likely tokens whose probabilities add up to `top_p`, at least one."""
    sorted_BV, order_BV = logits_BV.sort(dim=-1)
    unlikely_BV = sorted_BV.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    unlikely_BV[:, -1] = False
    return logits_BV.masked_fill(unlikely_BV.scatter(1, order_BV, unlikely_BV), -math.inf)


def gumbel(keys_2B: Tensor, positions_B: Tensor, vocab_size: int) -> Tensor:
    """Returns a number from a Gumbel distribution for each row and token."""
    here_B = hash_bits(positions_B, keys_2B)
    tokens_V = torch.arange(vocab_size, device=positions_B.device)
    bits_BV = hash_bits(tokens_V, torch.stack((here_B, keys_2B[1]))[:, :, None])
    # log1p, not log: small numbers keep their precision in float32, and they decide the result.
    small_BV = ((bits_BV >> 11) & ((1 << 53) - 1)).to(torch.float32).add_(0.5).mul_(2.0**-53)
    return -torch.log(-torch.log1p(-small_BV.clamp_(max=1 - 2.0**-24)))
