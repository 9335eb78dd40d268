"""float32 numbers kept in bfloat16: split master weights, and stochastically rounded moments.

A split weight is a bfloat16 weight and a 16-bit remainder. Together they are the float32 number,
bit for bit, in the same four bytes; but the bfloat16 weight can be used directly for computation
(parallel/master_weights.py). It is rounded to nearest, ties away from zero: then the remainder of
every number fits into 16 signed bits (with ties to even, both ±2^15 would occur). NaN stays NaN, in
a single form: rounded like other numbers, a GPU's NaN (all bits 1) would become -0.

A moment changes by a twentieth or a thousandth per step, but bfloat16 only resolves relative
differences of 1/256: rounded to nearest, a slow average would never change. Rounded up or down at
random, the nearer number more likely, it stays unbiased. The random bits are a hash of a key and an
element's position in the whole parameter. So they need no state, and do not depend on how the
parameter is sharded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NOT_A_NUMBER = 0x7FC00000
HALF = 1 << 15  # half a unit in the last place of bfloat16, in units of float32
LOW_32 = 0xFFFFFFFF


def split(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bfloat16 weights of a float32 tensor, and their int16 remainders."""
    bits = wide.view(torch.int32).where(wide == wide, NOT_A_NUMBER)
    upper = (bits + HALF) >> 16  # a carry into the exponent is correct: it gives the next number
    rest = bits - (upper << 16)
    return upper.to(torch.int16).view(torch.bfloat16), rest.to(torch.int16)


def join(narrow: Tensor, rest: Tensor) -> Tensor:
    """Returns the float32 tensor that was split.

    If something else has been written into the bfloat16 weight since, the stale remainder changes
    it by half a unit at most. Only zero is special: a negative remainder, which `split` never gives
    to a zero, would borrow from the sign and make it NaN, so it is dropped.
    """
    rest = rest.where((narrow != 0) | (rest > 0), 0)
    bits = (narrow.view(torch.int16).to(torch.int32) << 16) + rest.to(torch.int32)
    return bits.view(torch.float32)


class Places(NamedTuple):
    """Where a shard lies in the whole parameter: it has the first `columns` of every `stride`
    elements, counted from `first` on."""

    first: int = 0
    columns: int = 1
    stride: int = 1


WHOLE = Places()


def random_bits(
    size: int, count: Tensor, number: int, start: int = 0, places: Places = WHOLE
) -> Tensor:
    """Returns 32 random bits (in int64) for each of `size` elements of a shard from `start` on;
    they differ for each count and number."""
    key = _hash((count.to(torch.int64) * 0x9E3779B9 + number) & LOW_32)
    index = torch.arange(start, start + size, device=count.device)
    if places.columns != places.stride:
        index = index // places.columns * places.stride + index % places.columns
    return _hash(((index + places.first) & LOW_32) ^ key)


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
