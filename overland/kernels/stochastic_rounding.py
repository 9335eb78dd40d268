"""Stochastic rounding of float32 to bfloat16: up or down at random, the nearer number more likely.

A moment moves by a twentieth or a thousandth of itself per step, and bfloat16 tells apart numbers
that are a 256th apart: rounded to nearest, a slow average would stand still. Rounded
stochastically, it stays unbiased.

The random bits are a hash of a key and a number's place in its shard. So they need no state, and a
run that is resumed in the same layout rounds as the unbroken one does.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOW_32 = 0xFFFFFFFF


def random_bits(size: int, count: Tensor, number: int, first: int = 0) -> Tensor:
    """Returns 32 random bits (in int64) for each of `size` places from `first` on; they differ for
    each count and number."""
    key = _hash((count.to(torch.int64) * 0x9E3779B9 + number) & LOW_32)
    return _hash(torch.arange(first, first + size, device=count.device) ^ key)


def _hash(x: Tensor) -> Tensor:
    """Hashes x: every bit of the result depends on every bit of x (the constants are
    C. Wellons')."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & LOW_32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & LOW_32
    return x ^ (x >> 16)


def round_stochastically(wide: Tensor, bits: Tensor) -> Tensor:
    """Returns `wide`, float32, in bfloat16, by 16 random bits for each of its numbers."""
    bits = bits.to(torch.int32).view(wide.shape).where(wide == wide, 0)  # else NaN may carry over
    carried = wide.view(torch.int32) + bits
    return (carried >> 16).to(torch.int16).view(torch.bfloat16)
