"""AdamW on float32 parameters that are kept in halves (see split.py), in one pass.

Per parameter 26 bytes are moved: both halves and both moments in and out, a bfloat16 gradient in.
A float32 parameter with a bfloat16 copy would take 30, and 2 more bytes of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overland.kernels.choice import triton_takes
from overland.kernels.split import join, split


@dataclass(frozen=True)
class Rates:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool  # AdamW; else the decay enters the gradient, as in Adam


@dataclass(frozen=True)
class SplitState:
    """One parameter with all that an update of it reads and writes."""

    narrow: Tensor  # bfloat16
    rest: Tensor  # int16
    gradient: Tensor  # any floating-point type
    exp_avg: Tensor  # float32
    exp_avg_sq: Tensor  # float32


def update_split(
    states: Sequence[SplitState],
    num_updates: Tensor,
    rates: Rates,
    divisor: Tensor,
    skip: Tensor,
) -> None:
    """Updates in place with gradients divided by `divisor`; a non-zero `skip` changes nothing.

    `num_updates` counts this update already. All three tensors are float32 scalars on the device.
    """
    if not states:
        return
    if triton_takes(states[0].narrow):
        from overland.kernels.adamw_triton import update_split_triton

        update_split_triton(states, num_updates, rates, divisor, skip)
    else:
        update_split_plain(states, num_updates, rates, divisor, skip)


def update_split_plain(
    states: Sequence[SplitState],
    num_updates: Tensor,
    rates: Rates,
    divisor: Tensor,
    skip: Tensor,
) -> None:
    """The definition: join, PyTorch's own fused update, split."""
    kernel = torch._fused_adamw_ if rates.decoupled else torch._fused_adam_
    for state in states:
        wide = join(state.narrow, state.rest)
        kernel(
            [wide],
            [state.gradient.to(torch.float32, copy=True)],  # the kernel writes into it
            [state.exp_avg],
            [state.exp_avg_sq],
            [],
            [num_updates],
            lr=rates.lr,
            beta1=rates.beta1,
            beta2=rates.beta2,
            weight_decay=rates.weight_decay,
            eps=rates.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=skip,
        )
        narrow, rest = split(wide)
        state.narrow.copy_(narrow)
        state.rest.copy_(rest)
