"""How matrices are multiplied in 8 bits: one scale per tensor, from its largest element, the casts,
and the product; models/float8.py decides which layers use it.

A tensor is multiplied by a scale that maps its largest element to the end of the dtype's range, and
rounded. The product of two such tensors, divided by both scales, is close to the product of the
tensors, at twice the speed of bfloat16. Hopper multiplies only rows by rows, a_MK · b_NK, so each
of the three products of a linear layer needs its operands in the right orientation; `cast` writes a
tensor as it is, transposed, or both in one pass.

The casts are custom operators: the compiler neither repeats them in the backward pass (it keeps the
8-bit tensor) nor computes the same one twice (queries, keys and values share one).
"""

from __future__ import annotations

import torch
from torch import Tensor

from overland.kernels import triton_takes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Avoids an infinite scale for zeros: 2^-100 does not affect any value that matters in bfloat16.
LEAST = 2.0**-100
MULTIPLE = 16  # of elements in a row, for Hopper's matrix units
# The units' fast sums are off by 2e-3 to 3e-3, the casts by 4e-2 and more; exact sums cost 2 %.
FAST_SUMS = True


def scale_for(x: Tensor, dtype: torch.dtype, by_rows: bool = True) -> Tensor:
    """Returns the float32 scale that maps the largest element to the end of the range.

    Reduced by rows first, the compiler fuses it with the kernel that computes the rows: no separate
    pass over the output of a norm, SwiGLU or a rotation.
    """
    magnitudes = x.abs()
    largest = (magnitudes.amax(-1) if by_rows else magnitudes).amax()
    return torch.finfo(dtype).max / largest.float().clamp(min=LEAST)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x · scale in 8 bits."""
    return torch.ops.overland.float8_cast(x, scale, dtype, True, False)[0]


def cast_transposed(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the transpose of `cast`, contiguous in memory."""
    return torch.ops.overland.float8_cast(x, scale, dtype, False, True)[1]


def cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    as_it_is, transposed = torch.ops.overland.float8_cast(x, scale, dtype, True, True)
    return as_it_is, transposed


def product(
    a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Returns a · bᵀ of the original, unscaled tensors."""
    if a_MK.is_cuda and dtype != torch.float64:
        return torch._scaled_mm(
            a_MK,
            b_NK.t(),
            scale_a=a_scale.reciprocal(),
            scale_b=b_scale.reciprocal(),
            out_dtype=dtype,
            use_fast_accum=FAST_SUMS,
        )
    return product_plain(a_MK, b_NK, a_scale, b_scale, dtype)


def product_plain(
    a_MK: Tensor, b_NK: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Defines `product`."""
    wide = torch.promote_types(dtype, torch.float32)
    return (a_MK.to(wide) @ b_NK.to(wide).t() / (a_scale * b_scale)).to(dtype)


def cast_plain(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    """Defines the casts; a result that is not requested is empty."""
    most = torch.finfo(dtype).max
    # Clamped, because a scale rounded up would turn the largest element into NaN.
    narrow = (x.float() * scale).clamp(-most, most).to(dtype)
    empty = narrow.new_empty(0)
    return narrow if rows else empty, narrow.t().contiguous() if columns else empty.clone()


@torch.library.custom_op("overland::float8_cast", mutates_args=())
def _cast(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    if triton_takes(x, "float8"):
        from overland.kernels.triton_kernels import cast_triton

        return cast_triton(x, scale, dtype, rows, columns)
    return cast_plain(x, scale, dtype, rows, columns)


@_cast.register_fake
def _(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    height, width = x.shape
    return (
        x.new_empty((height, width) if rows else (0,), dtype=dtype),
        x.new_empty((width, height) if columns else (0,), dtype=dtype),
    )
