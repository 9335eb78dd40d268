"""Losses and statistics inside a model, such as the balance of a router's experts.

A loss inside a block is not added to the final loss, which may be computed on another device: its
gradient enters at its block. It is one number per row (sequence), divided by the number of rows in
the global batch, which is known before the first pass; so neither accumulation, nor data
parallelism, nor a pipeline can change it. Both are recorded in the backward pass, so a recomputed
block counts once, and validation does not count at all.

    class Router(nn.Module):
        def __init__(self, experts):
            self.balance = InnerLoss("balance_loss", weight=0.01)
            self.load = Statistic(experts)
            self.register_buffer("bias", torch.empty(experts))   # state: saved in checkpoints

        def forward(self, x_BSD):
            ...
            x_BSD = self.balance(x_BSD, loss_B)      # x itself; loss_B enters with its gradient
            x_BSD = self.load(x_BSD, tokens_per_expert)

        def after_step(self):                        # statistics of the whole global batch
            self.bias += 1e-3 * (self.load.total.mean() - self.load.total).sign()

`after_step(self, step)` is given the number of steps so far, including this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from overland.errors import ModelError
from overland.run_folder import first_taken


class Statistic(nn.Module):
    """Numbers that are summed over all tokens of a step."""

    total: Tensor

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("total", torch.empty(shape), persistent=False)

    def init_buffers(self) -> None:
        self.total.zero_()

    def forward(self, x: Tensor, values: Tensor) -> Tensor:
        """Returns `x`; the values are added when its gradient passes through."""
        if values.shape != self.total.shape:
            raise ModelError(
                f"a Statistic of shape {tuple(self.total.shape)} was given values of shape "
                f"{tuple(values.shape)}"
            )
        noted: Tensor = _Note.apply(_with_gradient(x), values, None, self.total)
        return noted

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Statistic:
        """Keeps sums and scales in float32 or wider, even in a low-precision model."""
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = buffer.to(torch.promote_types(buffer.dtype, torch.float32))
        return self


class InnerLoss(Statistic):
    """A loss per row, averaged over the rows of the global batch, times `weight`. The mean without
    the weight is logged under `name`, summed over all losses of that name."""

    scale: Tensor

    def __init__(self, name: str, weight: float) -> None:
        super().__init__()
        if first_taken([name]):
            raise ModelError(
                f"a loss inside a model cannot be logged as '{name}': choose another name"
            )
        self.name, self.weight = name, weight
        self.register_buffer("scale", torch.empty(()), persistent=False)

    def init_buffers(self) -> None:
        super().init_buffers()
        self.scale.fill_(1.0)

    def forward(self, x: Tensor, loss_B: Tensor) -> Tensor:
        """Returns `x`; the gradient of the loss enters with the gradient of `x`."""
        if loss_B.shape != x.shape[:1]:
            raise ModelError(
                f"the inner loss {self.name} has shape {tuple(loss_B.shape)}, but must be one "
                f"number for each of the {len(x)} rows: a mean over rows would depend on how they "
                "are split"
            )
        noted: Tensor = _Note.apply(_with_gradient(x), loss_B.sum(), self.scale, self.total)
        return noted


def _with_gradient(x: Tensor) -> Tensor:
    """Ensures that there is a gradient, so that everything is recorded. After frozen parameters
    only, there is none in a single process, but there is one in a later stage of a pipeline."""
    if x.requires_grad or not torch.is_grad_enabled():
        return x
    return x.detach().requires_grad_()


class _Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scale: Tensor | None, total: Tensor) -> Tensor:
        ctx.values, ctx.scale, ctx.total = values.detach(), scale, total
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        ctx.total += ctx.values
        if ctx.scale is None:
            return grad, None, None, None
        return grad, ctx.scale.to(ctx.values.dtype).expand_as(ctx.values), None, None
