"""Random numbers for dropout and noise that depend only on their position.

Every token of a batch has its own number, a hash of the seed, the sample, the epoch and the token's
position in its row. Each module derives its own random numbers from it and from its name. So they
are the same in every layout, when a pass is recomputed, and after a restart.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from overland.models.init import hash_bits, signed

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
    bits = hash_bits(draws[..., None] + places, keys)
    return ((bits >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def keys_of(name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return signed(int.from_bytes(digest[:8])), signed(int.from_bytes(digest[8:]))
