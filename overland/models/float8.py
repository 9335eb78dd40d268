"""The float8 transform: which linear layers multiply in 8 bits, and in which formats forward and
backward; scales and casts are in kernels/float8.py.

    out    = x · wᵀ        e4m3 · e4m3
    grad_x = grad · w      e5m2 · e4m3
    grad_w = gradᵀ · x     e5m2 · e4m3

Scales are computed in every pass, so there is no state to save or to go stale. The weight is cast
where it is used, once in each direction per pass. Only x in 8 bits is kept for the backward pass,
half as much as with bfloat16. Embeddings, norms, attention and the head are unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overland.kernels.float8 import (
    E4M3,
    E5M2,
    MULTIPLE,
    cast,
    cast_both,
    cast_transposed,
    product,
    scale_for,
)
from overland.models.linear import ChangedLinear, LinearTransform
from overland.models.lora import LoRALinear

GRADIENT = E5M2  # more range, less precision: e4m3 gave no better loss in 300 steps


class Float8(LinearTransform):
    """Makes the linear layers of the blocks multiply in 8 bits; parameters and names stay the
    same."""

    key = "training.float8"

    def change(self, name: str, module: nn.Linear) -> bool:
        if type(module) is nn.Linear:
            module.__class__ = Float8Linear
        elif isinstance(module, LoRALinear):  # whose own matrices are small
            module.product = biased8
        return isinstance(module, Float8Linear | LoRALinear)

    def has_changed(self, module: nn.Module, matrix: Tensor) -> bool:
        is_fit = not any(size % MULTIPLE for size in matrix.shape)
        return isinstance(module, Float8Linear | LoRALinear) and is_fit


class Float8Linear(ChangedLinear):
    def multiply(self, x: Tensor, weight_OD: Tensor, first: int = 0) -> Tensor:
        return linear8(x, weight_OD)


def biased8(x: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    out = linear8(x, weight_OD)
    return out if bias_O is None else out + bias_O


def linear8(x: Tensor, weight_OD: Tensor) -> Tensor:
    """Computes x · weightᵀ in 8 bits, or in the usual precision if a size does not suit the matrix
    units."""
    x_ND = x.flatten(0, -2)
    if any(size % MULTIPLE for size in (x_ND.shape[0], *weight_OD.shape)):
        return F.linear(x, weight_OD)
    out_NO: Tensor = Float8Product.apply(x_ND, weight_OD)
    return out_NO.unflatten(0, x.shape[:-1])


class Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        x_scale, weight_scale = scale_for(x_ND, E4M3), scale_for(weight_OD, E4M3, by_rows=False)
        narrow_ND, narrow_DN = cast_both(x_ND, x_scale, E4M3)
        ctx.save_for_backward(narrow_DN, x_scale, weight_OD, weight_scale)
        weight8_OD = cast(weight_OD, weight_scale, E4M3)
        return product(narrow_ND, weight8_OD, x_scale, weight_scale, x_ND.dtype)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None]:
        narrow_DN, x_scale, weight_OD, weight_scale = ctx.saved_tensors
        scale = scale_for(grad_NO, GRADIENT)
        narrow_NO, narrow_ON = cast_both(grad_NO, scale, GRADIENT)
        grad_x = grad_weight = None
        dtype = grad_NO.dtype
        if ctx.needs_input_grad[0]:
            weight_DO = cast_transposed(weight_OD, weight_scale, E4M3)
            grad_x = product(narrow_NO, weight_DO, scale, weight_scale, dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = product(narrow_ON, narrow_DN, scale, x_scale, dtype)
        return grad_x, grad_weight
