"""The 4-bit transform (QLoRA): which frozen linear layers are kept in NF4, and how they multiply;
kernels/nf4.py defines the format.

A matrix is stored as bytes under its parameter's own name. It is unpacked only while one product is
computed, in the forward and in the backward pass: no 16-bit weights are kept in between.
Embeddings, norms and the head are unchanged.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overland.config.schema import Lora
from overland.errors import ModelError
from overland.kernels.nf4 import BLOCK, row_bytes, unpack
from overland.models.linear import ChangedLinear, LinearTransform
from overland.models.lora import LoRALinear
from overland.models.lora_targets import is_saved_whole
from overland.models.structure import Role


class NF4(LinearTransform):
    """Stores the linear layers of the blocks in 4 bits, except those that are trained."""

    key = "lora.base = nf4"

    def __init__(self, settings: Lora) -> None:
        self.settings = settings

    def change(self, name: str, module: nn.Linear) -> bool:
        is_plain = type(module) in (nn.Linear, LoRALinear)
        if not is_plain or is_saved_whole(f"{name}.weight", self.settings):
            return False
        narrow(module, name)
        return True

    def expects(self, name: str) -> bool:
        return not is_saved_whole(name, self.settings)

    def has_changed(self, module: nn.Module, matrix: Tensor) -> bool:
        return isinstance(module, NF4Linear | NF4LoRALinear)


def biased4(x: Tensor, packed: Tensor, bias_O: Tensor | None) -> Tensor:
    out: Tensor = NF4Product.apply(x, packed)
    return out if bias_O is None else out + bias_O


def no_roles(layer: nn.Module, role: Role) -> NoReturn:
    raise ModelError(
        "tensor parallelism splits rows, whose 4-bit weights share scales: shard instead"
    )


class NF4Linear(ChangedLinear):
    def multiply(self, x: Tensor, weight_OD: Tensor, first: int = 0) -> Tensor:
        return biased4(x, weight_OD, None)

    roles = no_roles


class NF4LoRALinear(LoRALinear):
    product = staticmethod(biased4)

    def dense(self, weight_OD: Tensor) -> Tensor:
        return unpack(weight_OD, torch.float32)

    roles = no_roles


class NF4Product(torch.autograd.Function):
    """Computes x · Wᵀ with a frozen W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        return F.linear(x, unpack(packed, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (packed,) = ctx.saved_tensors
        return grad @ unpack(packed, grad.dtype, after=grad), None


def narrow(module: nn.Linear, name: str) -> None:
    """Turns a linear layer into one in 4 bits, in place."""
    if module.in_features % BLOCK:
        raise ModelError(
            f"lora.base = nf4 needs rows of a multiple of {BLOCK} weights, but {name} has rows "
            f"of {module.in_features}"
        )
    module.__class__ = NF4LoRALinear if isinstance(module, LoRALinear) else NF4Linear
    size = (module.out_features, row_bytes(module.in_features))
    packed = torch.empty(size, dtype=torch.uint8, device=module.weight.device)
    module.weight = nn.Parameter(packed, requires_grad=False)


def narrow_matrices(model: nn.Module) -> dict[str, int]:
    """Returns the names of the parameters stored in 4 bits, and the number of columns of each."""
    return {
        f"{name}.weight": module.in_features
        for name, module in model.named_modules()
        if isinstance(module, NF4Linear | NF4LoRALinear)
    }
