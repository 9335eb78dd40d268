"""AdamW in one pass on split master weights, a bfloat16 weight and a 16-bit remainder each, and on
moments in bfloat16 (see bfloat16.py).

It moves 26 bytes per parameter: weight, remainder and both moments are read and written, and a
bfloat16 gradient is read. A float32 master weight with a bfloat16 copy would take 30, and 2 more
bytes of memory. With bfloat16 moments it is 18, and 20 for a float32 shard with a float32 gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overland.kernels import triton_takes
from overland.kernels.bfloat16 import join, random_bits, round_stochastically, split

PIECE = 2**23


@dataclass(frozen=True)
class Hyperparameters:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool  # AdamW; otherwise the decay enters the gradient, as in Adam


@dataclass(frozen=True)
class UpdateState:
    """One parameter with everything that an update reads and writes."""

    parameter: Tensor  # bfloat16 with a remainder, otherwise float32
    remainder: Tensor | None  # int16
    gradient: Tensor  # any floating-point type
    exp_avg: Tensor  # float32, or bfloat16, stochastically rounded
    exp_avg_sq: Tensor  # likewise
    number: int = 0  # the parameter's own seed for stochastic rounding


def update(
    states: Sequence[UpdateState],
    num_updates: Tensor,
    rates: Hyperparameters,
    divisor: Tensor,
    skip: Tensor,
) -> None:
    """Updates in place with gradients divided by `divisor`; a non-zero `skip` changes nothing.

    `num_updates` includes this update. All three tensors are scalars on the device.
    """
    if not states:
        return
    assert len({state.remainder is None for state in states}) == 1
    parameter, remainder = states[0].parameter, states[0].remainder
    has_kernel = remainder is not None or parameter.dtype == torch.float32
    run = update_triton if triton_takes(parameter) and has_kernel else update_plain
    run(states, num_updates, rates, divisor, skip)


def update_triton(
    states: Sequence[UpdateState],
    num_updates: Tensor,
    rates: Hyperparameters,
    divisor: Tensor,
    skip: Tensor,
) -> None:
    from overland.kernels.triton_kernels import launch_adamw

    # In float64, because 1 - 0.999 loses three digits in float32.
    count = num_updates.double()
    step_size = rates.lr / (1 - rates.beta1**count)
    root = (1 - rates.beta2**count).sqrt()
    numbers = torch.stack([divisor.double(), skip.double(), step_size, root, count]).float()
    for state in states:
        is_split = state.remainder is not None
        if not state.parameter.numel():  # a shard may be empty
            continue
        gradient = state.gradient
        if gradient.stride() != state.parameter.stride():  # the kernel sees flat memory
            assert state.parameter.is_contiguous()
            gradient = gradient.contiguous()
        launch_adamw(
            state.parameter.view(torch.int16) if is_split else state.parameter,
            state.remainder,
            gradient,
            state.exp_avg,
            state.exp_avg_sq,
            numbers,
            rates.beta1,
            rates.beta2,
            rates.eps,
            rates.weight_decay * (rates.lr if rates.decoupled else 1.0),
            state.number,
            rates.decoupled,
        )


def update_plain(
    states: Sequence[UpdateState],
    num_updates: Tensor,
    rates: Hyperparameters,
    divisor: Tensor,
    skip: Tensor,
) -> None:
    """Defines the update: PyTorch's own fused update in float32, with conversion before and
    after."""
    for first, state in in_pieces(states):
        parameter, remainder = state.parameter, state.remainder
        wide = parameter if remainder is None else join(parameter, remainder)
        gradient = state.gradient.to(torch.float32, copy=True)  # the kernel writes into it
        exp_avg, exp_avg_sq = state.exp_avg.float(), state.exp_avg_sq.float()
        piece = UpdateState(wide, None, gradient, exp_avg, exp_avg_sq)
        update_whole([piece], num_updates, rates, divisor, skip)
        if remainder is not None:
            narrow, left_over = split(wide)
            parameter.copy_(narrow)
            remainder.copy_(left_over)
        if state.exp_avg.dtype == torch.bfloat16:
            bits = random_bits(wide.numel(), num_updates, state.number, first)
            state.exp_avg.copy_(round_stochastically(exp_avg, bits & 0xFFFF))
            state.exp_avg_sq.copy_(round_stochastically(exp_avg_sq, bits >> 16))


def in_pieces(states: Sequence[UpdateState]) -> Iterator[tuple[int, UpdateState]]:
    """Yields pieces, each with the position of its first element. An update needs up to 51 bytes
    per element for temporaries: tens of GB for a whole embedding."""
    for state in states:
        parameter, gradient = state.parameter.view(-1), state.gradient.reshape(-1)
        remainder = None if state.remainder is None else state.remainder.view(-1)
        exp_avg, exp_avg_sq = state.exp_avg.view(-1), state.exp_avg_sq.view(-1)
        for first in range(0, parameter.numel(), PIECE):
            here = slice(first, first + PIECE)
            yield (
                first,
                UpdateState(
                    parameter[here],
                    None if remainder is None else remainder[here],
                    gradient[here],
                    exp_avg[here],
                    exp_avg_sq[here],
                    state.number,
                ),
            )


def update_whole(
    states: Sequence[UpdateState],
    num_updates: Tensor,
    rates: Hyperparameters,
    divisor: Tensor,
    skip: Tensor,
) -> None:
    """Runs PyTorch's own kernel, which takes any number of parameters at once, none of them split.
    It divides by a float32 number, which is not enough for float64."""
    gradients = [state.gradient for state in states]
    if divisor.dtype == torch.float64:
        for gradient in gradients:
            gradient /= divisor
        divisor = torch.ones_like(divisor, dtype=torch.float32)
    kernel = torch._fused_adamw_ if rates.decoupled else torch._fused_adam_
    kernel(
        [state.parameter for state in states],
        gradients,
        [state.exp_avg for state in states],
        [state.exp_avg_sq for state in states],
        [],
        [num_updates] * len(states),
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
