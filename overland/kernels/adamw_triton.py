"""`update` in Triton, of split or whole master weights: every number is read and written once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from overland.kernels.adamw import Rates, UpdateState

BLOCK, WARPS = 2048, 8  # 8 elements per thread: 16-bit numbers move in 16-byte pieces


def update_triton(
    states: Sequence[UpdateState],
    num_updates: Tensor,
    rates: Rates,
    divisor: Tensor,
    skip: Tensor,
) -> None:
    # In float64: 1 - 0.999 has lost three digits in float32.
    count = num_updates.double()
    step_size = rates.lr / (1 - rates.beta1**count)
    root = (1 - rates.beta2**count).sqrt()
    numbers = torch.stack([divisor.double(), skip.double(), step_size, root, count]).float()
    for state in states:
        size, is_split = state.parameter.numel(), state.remainder is not None
        if not size:  # a shard may be empty
            continue
        gradient = state.gradient
        if gradient.stride() != state.parameter.stride():  # the kernel sees rows of numbers
            assert state.parameter.is_contiguous()
            gradient = gradient.contiguous()
        _update[(triton.cdiv(size, BLOCK),)](
            state.parameter.view(torch.int16) if is_split else state.parameter,
            state.remainder if is_split else state.parameter,
            gradient,
            state.exp_avg,
            state.exp_avg_sq,
            numbers,
            size,
            rates.beta1,
            1 - rates.beta1,
            rates.beta2,
            1 - rates.beta2,
            rates.eps,
            rates.weight_decay * (rates.lr if rates.decoupled else 1.0),
            state.number,
            SPLIT=is_split,
            NARROW=state.exp_avg.dtype == torch.bfloat16,
            DECOUPLED=rates.decoupled,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


@triton.jit(do_not_specialize=["number"])
def _update(  # type: ignore[no-untyped-def]
    parameter_ptr,
    remainder_ptr,
    gradient_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    numbers_ptr,
    size,
    beta1,
    keep1,
    beta2,
    keep2,
    eps,
    decay,
    number,
    SPLIT: tl.constexpr,
    NARROW: tl.constexpr,
    DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    skip = tl.load(numbers_ptr + 1)
    if skip == 0.0:
        divisor = tl.load(numbers_ptr)
        step_size = tl.load(numbers_ptr + 2)
        root = tl.load(numbers_ptr + 3)
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < size

        if SPLIT:
            upper = tl.load(parameter_ptr + place, mask=inside, other=0).to(tl.int32)
            remainder = tl.load(remainder_ptr + place, mask=inside, other=0).to(tl.int32)
            is_zero = (upper & 0x7FFF) == 0  # see split.py's join
            remainder = tl.where(is_zero & (remainder < 0), 0, remainder)
            wide = ((upper << 16) + remainder).to(tl.float32, bitcast=True)
        else:
            wide = tl.load(parameter_ptr + place, mask=inside, other=0.0)
        gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32) / divisor
        exp_avg = tl.load(exp_avg_ptr + place, mask=inside, other=0.0).to(tl.float32)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + place, mask=inside, other=0.0).to(tl.float32)

        if DECOUPLED:
            wide -= decay * wide
        else:
            gradient += decay * wide
        exp_avg = beta1 * exp_avg + keep1 * gradient
        exp_avg_sq = beta2 * exp_avg_sq + keep2 * gradient * gradient
        wide -= step_size * exp_avg / (tl.sqrt(exp_avg_sq) / root + eps)

        if SPLIT:
            bits = tl.where(wide == wide, wide.to(tl.int32, bitcast=True), 0x7FC00000)
            upper = (bits + 32768) >> 16
            remainder = bits - (upper << 16)
            tl.store(parameter_ptr + place, upper.to(tl.int16), mask=inside)
            tl.store(remainder_ptr + place, remainder.to(tl.int16), mask=inside)
        else:
            tl.store(parameter_ptr + place, wide, mask=inside)
        if NARROW:  # the same random bits as in rounding.py
            count = tl.load(numbers_ptr + 4).to(tl.uint32)
            key = _mix(count * 0x9E3779B9 + number.to(tl.uint32))
            chance = _mix(place.to(tl.uint32) ^ key)
            exp_avg = _round_stochastically(exp_avg, chance & 0xFFFF)
            exp_avg_sq = _round_stochastically(exp_avg_sq, chance >> 16)
        tl.store(exp_avg_ptr + place, exp_avg, mask=inside)
        tl.store(exp_avg_sq_ptr + place, exp_avg_sq, mask=inside)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _round_stochastically(wide, bits):  # type: ignore[no-untyped-def]
    bits = tl.where(wide == wide, bits, 0)  # else what is not a number may carry over
    carried = wide.to(tl.uint32, bitcast=True) + bits
    return (carried >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
