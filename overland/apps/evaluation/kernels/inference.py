"""The operations of a layer without gradients, in as few kernels as possible. In generation a step
has few rows: reading each weight once should take all of the time.

These are the plain definitions; the Triton versions (triton_inference.py) need bfloat16 or float16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from overland.kernels import triton_takes

MOST_ROWS = 64  # with more rows the product itself takes time, and a library is faster


def linear(x_BD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    if not _is_few(x_BD, weight_ND):
        return F.linear(x_BD, weight_ND, bias_N)
    from overland.apps.evaluation.kernels import triton_inference

    return triton_inference.linear(x_BD, weight_ND, bias_N)


def gated(x_BD: Tensor, weight_2FD: Tensor, bias_2F: Tensor | None = None) -> Tensor:
    """Returns silu(gate) * up; the matrix holds the rows of the gate, then those of the other."""
    if bias_2F is None and _is_few(x_BD, weight_2FD):
        from overland.apps.evaluation.kernels import triton_inference

        return triton_inference.gated(x_BD, weight_2FD)
    both_B2F = F.linear(x_BD, weight_2FD, bias_2F)
    if not (_is_narrow(x_BD) and triton_takes(x_BD)):
        return silu_times_plain(both_B2F)
    from overland.apps.evaluation.kernels import triton_inference

    return triton_inference.silu_times(both_B2F)


def silu_times_plain(both_B2F: Tensor) -> Tensor:
    gate_BF, up_BF = both_B2F.chunk(2, dim=1)
    return F.silu(gate_BF) * up_BF


def add_norm(
    x_BD: Tensor, more_BD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns x + more, and its RMSNorm."""
    if not (_is_narrow(x_BD) and triton_takes(x_BD)):
        return add_norm_plain(x_BD, more_BD, weight_D, eps)
    from overland.apps.evaluation.kernels import triton_inference

    return triton_inference.add_norm(x_BD, more_BD, weight_D, eps)


def add_norm_plain(
    x_BD: Tensor, more_BD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if more_BD is not None:
        x_BD = x_BD + more_BD
    return x_BD, rms_norm(x_BD, weight_D, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the RMSNorm as in models/decoder.py: normalized in high precision, rounded, then
    multiplied by the weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def _is_few(x_BD: Tensor, weight_ND: Tensor) -> bool:
    return len(x_BD) <= MOST_ROWS and _is_narrow(weight_ND) and triton_takes(x_BD)


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)
