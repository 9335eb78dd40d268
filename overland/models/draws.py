"""Random numbers that depend only on their position: for initial weights (init.py), for dropout,
and for noise on embeddings (NEFTune).

Every token of a batch has its own number, a hash of the seed, the sample, the epoch and the token's
position in its row. Each module derives its own random numbers from it and from its name. So they
are the same in every layout, when a pass is recomputed, and after a restart.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

Keys = tuple[int, int] | Tensor


def draws_of(seed: int, sample_B: Tensor, epoch_B: Tensor, length: int) -> Tensor:
    """Returns a number for each token, [rows, length]."""
    first, second = keys_of(f"{seed}/samples"), keys_of(f"{seed}/tokens")
    row_B = hash_bits(hash_bits(sample_B, first) + epoch_B, second)
    places_S = torch.arange(length, device=sample_B.device)
    return hash_bits(row_B[:, None] + places_S, first)


def uniform(draws: Tensor, keys: Keys, width: int, first: int = 0) -> Tensor:
    """Returns numbers from [0, 1) for each token, […, width], with 24 bits each, which float32
    holds exactly. They start at number `first` of the stream with these keys."""
    places = torch.arange(first, first + width, device=draws.device)
    return unit(hash_bits(draws[..., None] + places, keys))


def unit(bits: Tensor) -> Tensor:
    """Returns a number from [0, 1) for each hash."""
    return ((bits >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def keys_of(name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return signed(int.from_bytes(digest[:8])), signed(int.from_bytes(digest[8:]))


def hash_bits(index: Tensor, key: tuple[int, int] | Tensor) -> Tensor:
    """Returns splitmix64 in wrapping int64, with a second key in the middle.

    With the first key alone, all parameters would be pieces of one stream, which may overlap.
    """
    bits = index * signed(0x9E3779B97F4A7C15) + key[0]
    bits = (bits ^ _shift(bits, 30) ^ key[1]) * signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift(bits, 27)) * signed(0x94D049BB133111EB)
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, places: int) -> Tensor:
    """Shifts right logically, which torch cannot do for int64."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


class EmbeddingNoise(nn.Module):
    """Noise on embeddings while training (NEFTune, Jain et al. 2023, arXiv:2310.05914).

        x  +  alpha / √(S · D) · u        u: uniform from -1 to 1, for each element of S tokens

    Its seeds come with the batch, and only in training: so layouts, accumulation and restarts do
    not change it, and validation has none.
    """

    num_shares = 1
    """Number of ranks that receive different tokens of a row."""
    part = 0
    """Which of several equal parts of these tokens the local embedding returns."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.keys = keys_of("neftune")

    def forward(self, x_BRD: Tensor, noise_BS: Tensor) -> Tensor:
        """Adds noise to the embeddings of all or some of the S local tokens of each row."""
        num_places, width = x_BRD.shape[1:]
        draws_BR = noise_BS[:, self.part * num_places :][:, :num_places]
        # Row by row: a row of 2048 × 4096 takes 64 MB for each of a few 64-bit temporaries.
        u_BRD = torch.stack([uniform(draws_R, self.keys, width) for draws_R in draws_BR])
        scale = self.alpha / math.sqrt(noise_BS.shape[1] * self.num_shares * width)
        wide = torch.promote_types(x_BRD.dtype, torch.float32)
        return x_BRD + (scale * (2 * u_BRD.to(wide) - 1)).to(x_BRD.dtype)
