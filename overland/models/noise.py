"""Random numbers that are a pure function of a seed, an epoch and the number of a sample: the same
on every rank, device and restart."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from overland.models.init import mix, signed


def uniform(seed: str, sample_B: Tensor, epoch_B: Tensor, count: int) -> Tensor:
    """[B, count] numbers from [0, 1), with 24 bits each: float32 holds them exactly."""
    digest = hashlib.blake2b(seed.encode(), digest_size=32).digest()
    keys = [signed(int.from_bytes(digest[i : i + 8])) for i in range(0, 32, 8)]
    row_B = mix(mix(sample_B, (keys[0], keys[1])) + epoch_B, (keys[2], keys[3]))
    places_N = torch.arange(count, device=sample_B.device)
    bits_BN = mix(row_B[:, None] + places_N, (keys[1], keys[2]))
    return ((bits_BN >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24
