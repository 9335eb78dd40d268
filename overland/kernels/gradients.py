"""Kernels for gradients: that of a cross-entropy, the sum of squares of many tensors, and a tensor
scaled and rounded.

The gradient of a cross-entropy overwrites the logits, so [rows, vocabulary] exists once and in low
precision only. PyTorch's own steps (log-softmax in float32, exp, scatter, rounding) move 18 bytes
per logit, this one 4: the second pass over a row finds it in the cache.

PyTorch's own norm of a list reads bfloat16 at about half the memory bandwidth. PyTorch also scales
and rounds in one pass, but element by element if dtypes differ: 2.5 ms for the gradient of an 8B
model's output matrix, which `scaled` writes in 0.8 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from overland.kernels import triton_takes

NARROW = (torch.bfloat16, torch.float16, torch.float32)


def cross_entropy_(logits_CV: Tensor, labels_C: Tensor, ignored: int) -> Tensor:
    """Returns -log p(label) per row, in float32 or wider; `logits_CV` then holds d loss / d logits.

    Rows with the label `ignored` have loss 0 and gradient 0.
    """
    if triton_takes(logits_CV, "cross_entropy") and logits_CV.dtype in NARROW:
        from overland.kernels.triton_kernels import cross_entropy_triton_

        return cross_entropy_triton_(logits_CV, labels_C, ignored)
    return cross_entropy_plain_(logits_CV, labels_C, ignored)


@torch.no_grad()
def cross_entropy_plain_(logits_CV: Tensor, labels_C: Tensor, ignored: int) -> Tensor:
    """Defines `cross_entropy_`."""
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    valid_C1 = (labels_C != ignored)[:, None]
    labels_C1 = labels_C.clamp(min=0)[:, None]
    log_probs_CV = logits_CV.log_softmax(dim=-1, dtype=wide)
    losses_C1 = -log_probs_CV.gather(1, labels_C1) * valid_C1
    gradient_CV = log_probs_CV.exp_()  # in place: a second float32 [C, V] would cost another 1 GB
    gradient_CV.scatter_(1, labels_C1, gradient_CV.gather(1, labels_C1) - 1)
    logits_CV.copy_(gradient_CV.mul_(valid_C1))
    return losses_C1[:, 0]


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the sum of squares of all tensors, in float32 or wider, on their device."""
    if triton_takes(tensors[0], "norm") and tensors[0].dtype != torch.float64:
        from overland.kernels.triton_kernels import sum_of_squares_triton

        return sum_of_squares_triton(tensors)
    return sum_of_squares_plain(tensors)


def sum_of_squares_plain(tensors: Sequence[Tensor]) -> Tensor:
    """Defines `sum_of_squares`. A norm rounded to bfloat16 would be off by up to 0.4 %."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(list(tensors), 2, wide)).square().sum()


def scaled(wide: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns (wide * factor).to(dtype), multiplied in the wider dtype."""
    if triton_takes(wide, "scale") and wide.is_contiguous() and wide.dtype == torch.float32:
        from overland.kernels.triton_kernels import scaled_triton

        return scaled_triton(wide, factor, dtype)
    return scaled_plain(wide, factor, dtype)


def scaled_plain(wide: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Defines `scaled`."""
    return (wide * factor).to(dtype)
