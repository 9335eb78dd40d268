"""Optimizers as a user would write them: the Muon of docs/extending.md, and one with packed and
scalar state. Importing this module registers both, in the tests' own process and on ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from overland.optimizers import Elementwise, Packed, Scalar, register_optimizer
from tests.cli.processes import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
(MUON,) = [block for block in BLOCKS if "register_optimizer" in block]
exec(compile(MUON, "docs/extending.md", "exec"), {"__name__": __name__})

BLOCK = 64


def pack(numbers: Tensor) -> tuple[Tensor, ...]:
    """Signed 8-bit numbers, with a power of two as the scale of each block: packing what was
    unpacked changes nothing."""
    largest = numbers.abs().amax(1, keepdim=True).clamp(min=1e-30)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 127)))
    return (numbers / scale).round().to(torch.int8), scale


def unpack(narrow: Tensor, scale: Tensor) -> Tensor:
    return narrow.float() * scale


@dataclass(frozen=True)
class EightBit(Elementwise):
    """Momentum in 8 bits, and a learning rate that falls with a count of its own."""

    momentum: float = 0.9

    def state(self, name, shape):
        return {"momentum": Packed(pack, unpack, BLOCK, 1 + 4 / BLOCK), "count": Scalar("float64")}

    def update(self, parameter, gradient, state, rates):
        momentum = self.momentum * state["momentum"] + gradient
        count = state["count"] + 1
        return parameter - rates.lr / count * momentum, {"momentum": momentum, "count": count}


register_optimizer("EightBit", EightBit)
