"""`cross_entropy_` as a Triton kernel: one program per row, two passes over it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 8192, 16


def cross_entropy_triton_(logits_CV: Tensor, labels_C: Tensor, ignored: int) -> Tensor:
    assert logits_CV.stride(1) == 1
    losses_C = torch.empty(len(logits_CV), dtype=torch.float32, device=logits_CV.device)
    if len(logits_CV):
        _cross_entropy[(len(logits_CV),)](
            logits_CV,
            labels_C,
            losses_C,
            logits_CV.stride(0),
            logits_CV.shape[1],
            ignored,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return losses_C


@triton.jit
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits_ptr, labels_ptr, losses_ptr, stride, num_classes, ignored, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    is_valid = label != ignored
    places = tl.arange(0, BLOCK)

    largest = -float("inf")
    total = 0.0
    for start in range(0, num_classes, BLOCK):
        inside = start + places < num_classes
        x = tl.load(logits_ptr + start + places, mask=inside, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    log_sum = largest + tl.log(total)

    x_label = tl.load(logits_ptr + label, mask=is_valid, other=0.0).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(is_valid, log_sum - x_label, 0.0))
    tl.debug_barrier()  # the label's logit is read by every warp before any warp overwrites it

    # Backwards: what was read last is most likely still in the cache.
    num_blocks = tl.cdiv(num_classes, BLOCK)
    for block in range(num_blocks):
        start = (num_blocks - 1 - block) * BLOCK
        inside = start + places < num_classes
        x = tl.load(logits_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.exp(x - log_sum) - tl.where(start + places == label, 1.0, 0.0)
        gradient = tl.where(is_valid, gradient, 0.0)
        tl.store(logits_ptr + start + places, gradient, mask=inside)
