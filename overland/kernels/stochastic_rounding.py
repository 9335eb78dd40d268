"""Stochastic rounding of float32 to bfloat16: up or down at random, the nearer number more likely.

A moment changes by a twentieth or a thousandth per step, but bfloat16 only resolves relative
differences of 1/256: rounded to nearest, a slow average would never change. Rounded stochastically,
it stays unbiased.

The random bits are a hash of a key and an element's position in its shard. So they need no state,
and a run that is resumed in the same layout rounds exactly as if it had not been interrupted.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOW_32 = 0xFFFFFFFF


def random_bits(size: int, count: Tensor, number: int, first: int = 0) -> Tensor:
    """Returns 32 random bits (in int64) for each of `size` positions from `first` on; they differ
    for each count and number."""
    key = _hash((count.to(torch.int64) * 0x9E3779B9 + number) & LOW_32)
    return _hash(torch.arange(first, first + size, device=count.device) ^ key)


def _hash(x: Tensor) -> Tensor:
    """Hashes x: every bit of the result depends on every bit of x (the constants are
    C. Wellons')."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & LOW_32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & LOW_32
    return x ^ (x >> 16)


def round_stochastically(wide: Tensor, bits: Tensor) -> Tensor:
    """Rounds `wide` from float32 to bfloat16, using 16 random bits for each element."""
    bits = bits.to(torch.int32).view(wide.shape).where(wide == wide, 0)  # keeps NaN as it is
    carried = wide.view(torch.int32) + bits
    return (carried >> 16).to(torch.int16).view(torch.bfloat16)
