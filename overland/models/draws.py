"""Random numbers of a pass that depend on nothing but their place: for dropout, and noise.

Every token of a batch has a number of its own, made of the seed, the sample, the epoch and the
token's place in its row. What draws makes its own numbers of that, by its name. So they are the
same in every layout, when a pass is recomputed, and after a restart.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from overland.models.init import hash_bits, signed

Keys = tuple[int, int] | Tensor


def draws_of(seed: int, sample_B: Tensor, epoch_B: Tensor, length: int) -> Tensor:
    """[rows, length]: a number for each token."""
    first, second = keys_of(f"{seed}/samples"), keys_of(f"{seed}/tokens")
    row_B = hash_bits(hash_bits(sample_B, first) + epoch_B, second)
    places_S = torch.arange(length, device=sample_B.device)
    return hash_bits(row_B[:, None] + places_S, first)


def uniform(draws: Tensor, keys: Keys, width: int, first: int = 0) -> Tensor:
    """[…, width]: numbers from [0, 1) for each token, with 24 bits each, which float32 holds
    exactly; those from `first` on of whoever has these keys."""
    places = torch.arange(first, first + width, device=draws.device)
    bits = hash_bits(draws[..., None] + places, keys)
    return ((bits >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def keys_of(name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return signed(int.from_bytes(digest[:8])), signed(int.from_bytes(digest[8:]))
