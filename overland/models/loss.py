"""Cross-entropy of the output matrix, without ever holding all logits.

The gradients are computed in the forward pass, while a chunk's logits are there, so nothing is
recomputed: the price is one gradient of the output matrix kept from forward to backward, which
follow each other at once in training. The gradient of the logits takes their place in memory (see
kernels/cross_entropy.py), and so the largest thing there is one chunk in the narrow type: 2.1 GB
for 8192 tokens and a vocabulary of 128256. Every further chunk reads and writes the gradient of
the output matrix once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overland.kernels.choice import triton_takes
from overland.kernels.cross_entropy import cross_entropy_
from overland.kernels.scale import scaled

IGNORED = -100
CHUNK_TOKENS = 2048  # where logits are widened in memory
KERNEL_CHUNK_TOKENS = 8192  # where a kernel does all in place


def chunked_cross_entropy(
    hidden_BSD: Tensor,
    weight_VD: Tensor,
    labels_BS: Tensor,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Sum of -log p(label) over labels other than -100, as a float32 (or wider) scalar."""
    if chunk_tokens is None:
        chunk_tokens = KERNEL_CHUNK_TOKENS if triton_takes(hidden_BSD) else CHUNK_TOKENS
    hidden_ND = hidden_BSD.reshape(-1, hidden_BSD.shape[-1])
    return _ChunkedCrossEntropy.apply(hidden_ND, weight_VD, labels_BS.reshape(-1), chunk_tokens)


def plain_cross_entropy(hidden_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor) -> Tensor:
    """The definition that the chunked one is tested against; holds all logits."""
    logits_NV = (hidden_BSD @ weight_VD.t()).flatten(0, -2)
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    return torch.nn.functional.cross_entropy(
        logits_NV.to(wide), labels_BS.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunk_tokens: int
    ) -> Tensor:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND) if need_hidden else None
        grad_weight_VD = None

        for start in range(0, hidden_ND.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            hidden_CD = hidden_ND[rows]
            logits_CV = hidden_CD @ weight_VD.t()
            total += cross_entropy_(logits_CV, labels_N[rows], IGNORED).sum()
            grad_CV = logits_CV  # what is in it now
            if grad_hidden_ND is not None:
                grad_hidden_ND[rows] = grad_CV @ weight_VD
            if need_weight:
                grad_weight_VD = add_product(grad_weight_VD, grad_CV.t(), hidden_CD, wide)
            del logits_CV, grad_CV  # or the next chunk would be made beside this one

        ctx.weight_dtype = weight_VD.dtype
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        if grad_hidden_ND is not None:
            # Widened first: 1 / num_tokens rounded to bfloat16 would be off by up to 0.4 %.
            grad_hidden_ND = (grad_hidden_ND.to(grad.dtype) * grad).to(grad_hidden_ND.dtype)
        if grad_weight_VD is not None:
            grad_weight_VD = scaled(grad_weight_VD, grad, ctx.weight_dtype)
        return grad_hidden_ND, grad_weight_VD, None, None


def add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a @ b, in place, in `dtype`: in bfloat16 each further chunk would lose low bits."""
    # Only NVIDIA's library has a product of two types. Under autocast a and b may differ.
    if not triton_takes(a) or a.dtype != b.dtype or a.dtype == dtype:
        product = (a @ b).to(dtype)
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.addmm(total, a, b, out_dtype=dtype, out=total)
