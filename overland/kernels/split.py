"""A float32 number as a bfloat16 number and the 16 bits that its rounding leaves over.

Together they are the float32 number, bit for bit, in the same four bytes; but the upper half can be
computed with as it is. Rounding is to nearest, ties away from zero: then the remainder of every
number fits into 16 signed bits (with ties to even, both ±2^15 would occur). What is not a number
stays none in both, in one form: rounded as the others are, a GPU's (all bits 1) would become -0.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOT_A_NUMBER = 0x7FC00000
HALF = 1 << 15  # half a unit in the last place of the bfloat16 number, in units of the float32's


def split(wide: Tensor) -> tuple[Tensor, Tensor]:
    """(bfloat16, int16) of a float32 tensor."""
    bits = wide.view(torch.int32).where(wide == wide, NOT_A_NUMBER)
    upper = (bits + HALF) >> 16  # a carry into the exponent is right: it is the next number
    rest = bits - (upper << 16)
    return upper.to(torch.int16).view(torch.bfloat16), rest.to(torch.int16)


def join(narrow: Tensor, rest: Tensor) -> Tensor:
    """The float32 tensor that `split` took apart.

    If something else was written into the bfloat16 half since, the remainder that was left behind
    moves it by half a unit at most. Only zero has nothing below it: a negative remainder, which
    `split` never gives to a zero, would borrow from the sign and make it NaN, so it is dropped.
    """
    rest = rest.where((narrow != 0) | (rest > 0), 0)
    bits = (narrow.view(torch.int16).to(torch.int32) << 16) + rest.to(torch.int32)
    return bits.view(torch.float32)
