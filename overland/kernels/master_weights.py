"""float32 master weights, each split into a bfloat16 weight and a 16-bit remainder.

Together they are the float32 number, bit for bit, in the same four bytes; but the bfloat16 weight
can be computed with as it is. On one device a parameter *is* that weight (parallel/sharding.py),
and the remainder is kept next to it for the optimizer.

Rounding is to nearest, ties away from zero: then the remainder of every number fits into 16 signed
bits (with ties to even, both ±2^15 would occur). NaN stays NaN in both, in one form: rounded as the
others are, a GPU's (all bits 1) would become -0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

NOT_A_NUMBER = 0x7FC00000
HALF = 1 << 15  # half a unit in the last place of the bfloat16 number, in units of the float32's


def split(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bfloat16 weights of a float32 tensor, and their int16 remainders."""
    bits = wide.view(torch.int32).where(wide == wide, NOT_A_NUMBER)
    upper = (bits + HALF) >> 16  # a carry into the exponent is right: it is the next number
    rest = bits - (upper << 16)
    return upper.to(torch.int16).view(torch.bfloat16), rest.to(torch.int16)


def join(narrow: Tensor, rest: Tensor) -> Tensor:
    """Returns the float32 tensor that `split` took apart.

    If something else was written into the bfloat16 weight since, the remainder that was left behind
    moves it by half a unit at most. Only zero has nothing below it: a negative remainder, which
    `split` never gives to a zero, would borrow from the sign and make it NaN, so it is dropped.
    """
    rest = rest.where((narrow != 0) | (rest > 0), 0)
    bits = (narrow.view(torch.int16).to(torch.int32) << 16) + rest.to(torch.int32)
    return bits.view(torch.float32)


class MasterWeights:
    """float32 parameters, whole or split. They are split for training, and whole again wherever
    they are filled, saved or exported."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        # A tied parameter is met once; frozen ones are computed with in bfloat16 too.
        found = {p: None for part in parts for p in part.parameters()}
        self.parameters = [p for p in found if p.dtype == torch.float32]
        self.remainders: dict[nn.Parameter, Tensor] = {}  # empty: all are whole
        self.gradient_dtype: torch.dtype | None = None

    def split(self, gradient_dtype: torch.dtype | None = None) -> None:
        """From here on the parameters are bfloat16. `gradient_dtype` is what their gradients are
        summed in, where several passes add up; a single one needs no wider type than its own."""
        self.gradient_dtype = gradient_dtype
        for parameter in self.parameters:
            parameter.data, self.remainders[parameter] = split(parameter.data)
            if gradient_dtype is not None and parameter.requires_grad:
                parameter.grad_dtype = gradient_dtype

    def join(self) -> None:
        for parameter, remainder in self.remainders.items():
            parameter.data = join(parameter.data, remainder)
        self.remainders = {}

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the parameters are float32: what is read is exact, what is written is kept."""
        was_split = bool(self.remainders)
        self.join()
        try:
            yield
        finally:
            if was_split:
                self.split(self.gradient_dtype)
