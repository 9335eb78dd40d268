"""A wide tensor times a number on the device, rounded to a narrower type, in one pass.

PyTorch does it in one pass too, but element by element where types differ: 2.5 ms for the gradient
of an 8B model's output matrix, which this writes in 0.8 ms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overland.kernels.choice import triton_takes


def scaled(wide: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """(wide * factor).to(dtype), multiplied in the wide type."""
    if triton_takes(wide) and wide.is_contiguous() and wide.dtype == torch.float32:
        from overland.kernels.scale_triton import scaled_triton

        return scaled_triton(wide, factor, dtype)
    return scaled_plain(wide, factor, dtype)


def scaled_plain(wide: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The definition."""
    return (wide * factor).to(dtype)
