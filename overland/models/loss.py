"""Cross-entropy, z-loss and log-probabilities of labels, from hidden states and the output matrix,
in chunks, without ever holding all logits.

    weighted sum     Σ w · -log p(label), and z-loss: the gradients are computed in the forward
                     pass, while a chunk's logits exist, so nothing is recomputed. The price is one
                     gradient of the output matrix that is kept until the backward pass, which in
                     training follows immediately
    token losses     -log p(label) of each token, for losses that are not weighted sums of them: the
                     backward pass computes the logits again

The gradient of the logits overwrites them in memory (see kernels/gradients.py), so the largest
tensor is one chunk in low precision: 2.1 GB for 8192 tokens and a vocabulary of 128256. Each
additional chunk reads and writes the gradient of the output matrix once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from overland.kernels import is_on_nvidia, triton_takes
from overland.kernels.gradients import cross_entropy_, scaled
from overland.models.config import CHUNK_TOKENS, KERNEL_CHUNK_TOKENS

IGNORED = -100


class OutputMatrix:
    """The output matrix on one device. Tensor parallelism replaces it with a class that has the
    same methods (see parallel/tensor.py)."""

    def __init__(self, weight_VD: Tensor) -> None:
        self.weight_VD = weight_VD

    def weighted_sum(
        self,
        hidden_BSD: Tensor,
        labels_BS: Tensor,
        weights_BS: Tensor | None = None,
        z_loss: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Returns Σ w · (-log p(label) + z · log²Z) over labels other than -100, in float32 or
        wider, and the part of it that is z-loss, which has no gradient."""
        has_kernel = triton_takes(hidden_BSD, "cross_entropy")
        chunk = KERNEL_CHUNK_TOKENS if has_kernel else CHUNK_TOKENS
        weights_N = weights_BS.reshape(-1) if weights_BS is not None else None
        hidden_ND, labels_N = hidden_BSD.flatten(0, -2), labels_BS.reshape(-1)
        total, z_part = WeightedSum.apply(
            hidden_ND, self.weight_VD, labels_N, weights_N, z_loss, chunk
        )
        return total, z_part

    def token_losses(self, hidden_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        """Returns -log p(label) of each token, or 0 if the label is -100."""
        losses_N: Tensor = TokenLosses.apply(
            hidden_BSD.flatten(0, -2), self.weight_VD, labels_BS.reshape(-1), 0, None
        )
        return losses_N.view(labels_BS.shape)


class WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        weights_N: Tensor | None,
        z_loss: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden_ND.device)
        z_part = torch.zeros_like(total)
        grad_hidden_ND = torch.empty_like(hidden_ND) if need_hidden else None
        grad_weight_VD = None

        for start in range(0, hidden_ND.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            hidden_CD, labels_C = hidden_ND[rows], labels_N[rows]
            logits_CV = hidden_CD @ weight_VD.t()
            given_C = _logits_of(logits_CV, labels_C).to(wide) if z_loss else None
            losses_C = cross_entropy_(logits_CV, labels_C, IGNORED)
            grad_CV = logits_CV  # which it holds now
            if given_C is not None:
                z_part += add_z_loss_(losses_C, grad_CV, given_C, labels_C, weights_N, rows, z_loss)
            if weights_N is not None:
                losses_C = losses_C * weights_N[rows]
                grad_CV.mul_(weights_N[rows, None])
            total += losses_C.sum()
            if grad_hidden_ND is not None:
                grad_hidden_ND[rows] = grad_CV @ weight_VD
            if need_weight:
                grad_weight_VD = add_product(grad_weight_VD, grad_CV.t(), hidden_CD, wide)
            del logits_CV, grad_CV  # otherwise two chunks would exist at once

        ctx.weight_dtype = weight_VD.dtype
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD)
        ctx.mark_non_differentiable(z_part)
        return total, z_part

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        if grad_hidden_ND is not None:
            # Computed in float32: 1 / num_tokens rounded to bfloat16 would be off by up to 0.4 %.
            grad_hidden_ND = (grad_hidden_ND.to(grad.dtype) * grad).to(grad_hidden_ND.dtype)
        if grad_weight_VD is not None:
            grad_weight_VD = scaled(grad_weight_VD, grad, ctx.weight_dtype)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None


def add_z_loss_(
    losses_C: Tensor,
    grad_CV: Tensor,
    given_C: Tensor,
    labels_C: Tensor,
    weights_N: Tensor | None,
    rows: slice,
    z_loss: float,
) -> Tensor:
    """Adds z · log²Z to the losses, and its gradient; returns the weighted sum of what was added.
    `given_C` are the logits of the labels: log Z = loss + logit."""
    valid_C = labels_C != IGNORED
    log_z_C = (losses_C + given_C) * valid_C
    added_C = z_loss * log_z_C.square()
    # The gradient of z · log²Z is c · p, with c = 2 z log Z; except at the label, p is the
    # gradient.
    c_C1 = (2 * z_loss * log_z_C)[:, None]
    labels_C1 = labels_C.clamp(min=0)[:, None]
    grad_CV.mul_(1 + c_C1).scatter_add_(1, labels_C1, c_C1.to(grad_CV.dtype))
    losses_C += added_C
    return (added_C if weights_N is None else added_C * weights_N[rows]).sum()


def _logits_of(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
    return logits_CV.gather(1, labels_C.clamp(min=0)[:, None])[:, 0]


class TokenLosses(torch.autograd.Function):
    """Computes -log p(label) of each token. `first` is the first token id of the local part of the
    vocabulary, and `group` are the ranks with the other parts (None: all of it is local). Only log
    Z of each token is kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_vD: Tensor,
        labels_N: Tensor,
        first: int,
        group: Any,
    ) -> Tensor:
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        losses_N = torch.empty(len(hidden_ND), dtype=wide, device=hidden_ND.device)
        log_z_N = torch.empty_like(losses_N)
        for start in range(0, len(hidden_ND), CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            logits_Cv = (hidden_ND[rows] @ weight_vD.t()).to(wide)
            place_C1, here_C1 = places_of(labels_N[rows], first, len(weight_vD))
            label_C1 = logits_Cv.gather(1, place_C1) * here_C1
            largest_C1 = _over(logits_Cv.amax(1, keepdim=True), "max", group)
            sums_C1 = logits_Cv.sub_(largest_C1).exp_().sum(1, keepdim=True)
            sums_C2 = _over(torch.cat((sums_C1, label_C1), dim=1), "sum", group)
            log_z_N[rows] = sums_C2[:, 0].log() + largest_C1[:, 0]
            losses_N[rows] = log_z_N[rows] - sums_C2[:, 1]
        ctx.save_for_backward(hidden_ND, weight_vD, labels_N, log_z_N)
        ctx.first = first
        return losses_N * (labels_N != IGNORED)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_vD, labels_N, log_z_N = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_N = grad_N * (labels_N != IGNORED)
        grad_hidden_ND = torch.empty_like(hidden_ND) if need_hidden else None
        grad_weight_vD = None
        for start in range(0, len(hidden_ND), CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            hidden_CD = hidden_ND[rows]
            p_Cv = (hidden_CD @ weight_vD.t()).to(grad_N.dtype).sub_(log_z_N[rows, None]).exp_()
            place_C1, here_C1 = places_of(labels_N[rows], ctx.first, len(weight_vD))
            p_Cv.scatter_add_(1, place_C1, -here_C1.to(p_Cv.dtype))
            grad_Cv = p_Cv.mul_(grad_N[rows, None]).to(hidden_CD.dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[rows] = grad_Cv @ weight_vD
            if need_weight:
                grad_weight_vD = add_product(grad_weight_vD, grad_Cv.t(), hidden_CD, grad_N.dtype)
        if grad_weight_vD is not None:
            grad_weight_vD = grad_weight_vD.to(weight_vD.dtype)
        return grad_hidden_ND, grad_weight_vD, None, None, None


def places_of(labels_C: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns the position of each label in this part of the vocabulary, and whether it is
    there."""
    place_C1 = (labels_C - first)[:, None]
    here_C1 = (place_C1 >= 0) & (place_C1 < size)
    return place_C1.clamp(0, size - 1), here_C1


def _over(values: Tensor, how: str, group: Any) -> Tensor:
    if group is None:
        return values
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(values, how, group)


def add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns total + a @ b, in place, in `dtype`: in bfloat16 each additional chunk would lose low
    bits."""
    # Only NVIDIA's library has a mixed-precision product. Under autocast a and b may differ.
    if not is_on_nvidia(a) or a.dtype != b.dtype or a.dtype == dtype:
        product = (a @ b).to(dtype)
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.addmm(total, a, b, out_dtype=dtype, out=total)
