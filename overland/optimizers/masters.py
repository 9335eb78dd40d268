"""float32 master weights on one device: a bfloat16 weight and a 16-bit remainder.

A parameter *is* its bfloat16 number there (see parallel/sharding.py), and the 16 bits that rounding
left over are kept next to it for the optimizer (see kernels/split.py). The two together are the
float32 master weight, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from overland.kernels.split import join, split


class Masters:
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
