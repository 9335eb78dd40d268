"""`float8_cast` in Triton: a tile is read once and written as it is, turned, or both."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 128, 8  # 128 numbers of 8 bits are a whole line of the cache, in both directions


def cast_triton(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    height, width = x.shape
    as_it_is = torch.empty((height, width) if rows else 0, dtype=dtype, device=x.device)
    turned = torch.empty((width, height) if columns else 0, dtype=dtype, device=x.device)
    if x.numel():
        _cast[(triton.cdiv(height, BLOCK), triton.cdiv(width, BLOCK))](
            x,
            as_it_is,
            turned,
            scale,
            height,
            width,
            x.stride(0),
            x.stride(1),
            MOST=torch.finfo(dtype).max,
            ROWS=rows,
            COLUMNS=columns,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return as_it_is, turned


@triton.jit
def _cast(  # type: ignore[no-untyped-def]
    x_ptr,
    rows_ptr,
    columns_ptr,
    scale_ptr,
    height,
    width,
    stride,
    step,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < height)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride + column[None, :] * step, mask=inside, other=0.0)
    x = x.to(tl.float32) * tl.load(scale_ptr)
    # Not a number stays one: minimum and maximum would make a large number of it.
    x = tl.where(x > MOST, MOST, tl.where(x < -MOST, -MOST, x))
    if ROWS:
        at = row[:, None] * width + column[None, :]
        tl.store(rows_ptr + at, x.to(rows_ptr.dtype.element_ty), mask=inside)
    if COLUMNS:
        at = column[:, None] * height + row[None, :]
        turned = tl.trans(x.to(columns_ptr.dtype.element_ty))
        tl.store(columns_ptr + at, turned, mask=tl.trans(inside))
