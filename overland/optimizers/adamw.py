"""How AdamW's update is computed on shards, with kernels, all parameters of a group at once; its
options and state are in elementwise.py.

On split master weights, a bfloat16 weight and a 16-bit remainder each, and on moments in bfloat16
(see kernels/bfloat16.py), it is one pass of our own. It moves 26 bytes per parameter: weight,
remainder and both moments are read and written, and a bfloat16 gradient is read. A float32 master
weight with a bfloat16 copy would take 30, and 2 more bytes of memory. With bfloat16 moments it is
18, and 20 for a float32 shard with a float32 gradient.

Shards are updated in place, with gradients divided by `step.divisor`; a non-zero `step.skip`
changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from overland.kernels import triton_takes
from overland.kernels.bfloat16 import join, random_bits, round_stochastically, split
from overland.optimizers.elementwise import AdamW
from overland.optimizers.parameter_shard import ParameterShard, Step


def update_adamw(rule: AdamW, shards: Sequence[ParameterShard], step: Step) -> None:
    groups: dict[tuple[float, float], list[ParameterShard]] = {}
    for shard in shards:
        groups.setdefault((shard.lr_factor, shard.weight_decay), []).append(shard)
    for members in groups.values():
        update_group(rule, members, step)


def update_group(rule: AdamW, shards: Sequence[ParameterShard], step: Step) -> None:
    """Updates shards that have the same rates."""
    shards = [shard for shard in shards if shard.parameter.numel()]  # a shard may be empty
    if not shards:
        return
    assert len({shard.remainder is None for shard in shards}) == 1
    parameter, is_split = shards[0].parameter, shards[0].remainder is not None
    if not (rule.bf16_moments or is_split):
        update_whole(rule, shards, step)
    elif triton_takes(parameter, "adamw") and (is_split or parameter.dtype == torch.float32):
        update_triton(rule, shards, step)
    else:
        update_plain(rule, shards, step)


def update_triton(rule: AdamW, shards: Sequence[ParameterShard], step: Step) -> None:
    from overland.kernels.triton_kernels import launch_adamw

    lr, weight_decay = step.lr * shards[0].lr_factor, shards[0].weight_decay
    # In float64, because 1 - 0.999 loses three digits in float32.
    count = step.num_updates.double()
    step_size = lr / (1 - rule.beta1**count)
    root = (1 - rule.beta2**count).sqrt()
    numbers = torch.stack([step.divisor.double(), step.skip.double(), step_size, root, count])
    numbers = numbers.float()
    for shard in shards:
        is_split, gradient = shard.remainder is not None, shard.gradient
        if gradient.stride() != shard.parameter.stride():  # the kernel sees flat memory
            assert shard.parameter.is_contiguous()
            gradient = gradient.contiguous()
        launch_adamw(
            shard.parameter.view(torch.int16) if is_split else shard.parameter,
            shard.remainder,
            gradient,
            shard.state["exp_avg"],
            shard.state["exp_avg_sq"],
            numbers,
            rule.beta1,
            rule.beta2,
            rule.eps,
            weight_decay * (lr if rule.decoupled else 1.0),
            shard.seed,
            shard.places,
            rule.decoupled,
        )


def update_plain(rule: AdamW, shards: Sequence[ParameterShard], step: Step) -> None:
    """Defines the update: PyTorch's own fused update in float32, with conversion before and
    after."""
    for piece in (piece for shard in shards for piece in shard.pieces()):
        parameter, remainder = piece.parameter, piece.remainder
        wide = parameter if remainder is None else join(parameter, remainder)
        gradient = piece.gradient.to(torch.float32, copy=True)  # the kernel writes into it
        moments = {name: one.float() for name, one in piece.state.items()}
        whole = replace(piece, parameter=wide, remainder=None, gradient=gradient, state=moments)
        update_whole(rule, [whole], step)
        if remainder is not None:
            narrow, left_over = split(wide)
            parameter.copy_(narrow)
            remainder.copy_(left_over)
        if piece.state["exp_avg"].dtype == torch.bfloat16:
            size, count = wide.numel(), step.num_updates
            bits = random_bits(size, count, piece.seed, piece.start, piece.places)
            for name, chance in (("exp_avg", bits & 0xFFFF), ("exp_avg_sq", bits >> 16)):
                piece.state[name].copy_(round_stochastically(moments[name], chance))


def update_whole(rule: AdamW, shards: Sequence[ParameterShard], step: Step) -> None:
    """Runs PyTorch's own kernel, which takes any number of parameters at once, none of them split.
    It divides by a float32 number, which is not enough for float64."""
    gradients, divisor = [shard.gradient for shard in shards], step.divisor
    if divisor.dtype == torch.float64:
        for gradient in gradients:
            gradient /= divisor
        divisor = torch.ones_like(divisor, dtype=torch.float32)
    kernel = torch._fused_adamw_ if rule.decoupled else torch._fused_adam_
    kernel(
        [shard.parameter for shard in shards],
        gradients,
        [shard.state["exp_avg"] for shard in shards],
        [shard.state["exp_avg_sq"] for shard in shards],
        [],
        [step.num_updates] * len(shards),
        lr=step.lr * shards[0].lr_factor,
        beta1=rule.beta1,
        beta2=rule.beta2,
        weight_decay=shards[0].weight_decay,
        eps=rule.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
        found_inf=step.skip,
    )
