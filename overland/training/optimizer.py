"""AdamW, clipped and skipped without asking the host.

The fused kernel takes two extra numbers: a divisor for the gradients, and a flag that turns the
whole update into nothing. Clipping, the loss scale and "this step is not finite" all go through
these, so no extra pass over the gradients is made, and the loop never waits to learn whether a step
was good.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from overland.config.schema import Optimizer

Adam = torch.optim.AdamW | torch.optim.Adam


def build_optimizer(model: nn.Module, settings: Optimizer) -> Adam:
    """Matrices and embeddings decay; norms and biases (anything with one dimension) do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    kind = torch.optim.AdamW if settings.name == "AdamW" else torch.optim.Adam
    return kind(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )


def gradient_norm(optimizer: Adam) -> torch.Tensor:
    """The 2-norm of all gradients together, over every shard."""
    gradients = [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def update(
    optimizer: Adam,
    learning_rate: float,
    norm: torch.Tensor,
    max_norm: float,
    loss_scale: torch.Tensor,
    skip: torch.Tensor,
) -> None:
    """One step with gradients divided by the loss scale and clipped; `skip` leaves all as it is.

    `norm` is the norm of the gradients without their loss scale.
    """
    divisor = loss_scale
    if max_norm > 0:
        divisor = loss_scale * (norm / max_norm).clamp(min=1.0)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    # Attributes that PyTorch's own gradient scaler sets; the fused kernels read them.
    optimizer.grad_scale = divisor.float()  # type: ignore[union-attr]
    optimizer.found_inf = skip.float()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
