"""`scaled` in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


def scaled_triton(wide: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    narrow = torch.empty_like(wide, dtype=dtype)
    if wide.numel():
        blocks = triton.cdiv(wide.numel(), BLOCK)
        _scaled[(blocks,)](wide, narrow, factor, wide.numel(), BLOCK, num_warps=WARPS)
    return narrow


@triton.jit
def _scaled(wide_ptr, narrow_ptr, factor_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    x = tl.load(wide_ptr + places, mask=inside) * tl.load(factor_ptr).to(tl.float32)
    tl.store(narrow_ptr + places, x, mask=inside)
