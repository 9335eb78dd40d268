"""Cross-entropy of rows of logits and its gradient, in the memory of the logits.

The gradient overwrites the logits, so [rows, vocabulary] exists once and in low precision only.
PyTorch's own steps (log-softmax in float32, exp, scatter, rounding) move 18 bytes per logit, this
one 4: the second pass over a row finds it in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overland.kernels import triton_takes

NARROW = (torch.bfloat16, torch.float16, torch.float32)


def cross_entropy_(logits_CV: Tensor, labels_C: Tensor, ignored: int) -> Tensor:
    """Returns -log p(label) per row, in float32 or wider; `logits_CV` then holds d loss / d logits.

    Rows with the label `ignored` have loss 0 and gradient 0.
    """
    if triton_takes(logits_CV) and logits_CV.dtype in NARROW:
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
