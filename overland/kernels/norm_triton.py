"""`sum_of_squares` in Triton: a number per piece of each tensor, then the sum of those. No atomic
additions, so that the same gradients give the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, ROUNDS, WARPS = 4096, 4, 8
PIECE = BLOCK * ROUNDS


def sum_of_squares_triton(tensors: Sequence[Tensor]) -> Tensor:
    counts = [triton.cdiv(tensor.numel(), PIECE) for tensor in tensors]
    sums = torch.empty(sum(counts), dtype=torch.float32, device=tensors[0].device)
    start = 0
    for tensor, count in zip(tensors, counts, strict=True):
        if count:
            part = sums[start:]
            _sum_of_squares[(count,)](
                tensor.contiguous(), part, tensor.numel(), BLOCK, ROUNDS, num_warps=WARPS
            )
        start += count
    return sums.sum()


@triton.jit
def _sum_of_squares(  # type: ignore[no-untyped-def]
    tensor_ptr, sums_ptr, size, BLOCK: tl.constexpr, ROUNDS: tl.constexpr
):
    piece = tl.program_id(0).to(tl.int64)
    places = piece * BLOCK * ROUNDS + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for turn in tl.static_range(ROUNDS):
        at = places + turn * BLOCK
        x = tl.load(tensor_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        total += x * x
    tl.store(sums_ptr + piece, tl.sum(total, 0))
