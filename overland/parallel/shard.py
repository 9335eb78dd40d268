"""Data parallelism: parameters, gradients and optimizer state sharded over `dp_shard`, replicated
over `dp_replicate` (ZeRO, Rajbhandari et al. 2020), with FSDP2.

    stage   dp_shard   reshard after forward
    zero0      1              –               every rank holds everything, as in classic DDP
    zero2      n             no               parameters stay gathered until the backward pass
    zero3      n            yes               gathered again for the backward pass

Gradients are summed, not averaged: the loss is already divided by the number of tokens of the whole
global batch. A world of one is not sharded at all (see single.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from overland.config.schema import Training
from overland.parallel.mesh import Mesh
from overland.parallel.single import is_single


def shard(model: nn.Module, blocks: list[nn.Module], mesh: Mesh, training: Training) -> None:
    """Shards each block by itself, so that the next one is gathered while this one computes."""
    if is_single(mesh, training):
        return
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,
    )
    # On a CPU everything is in host memory already.
    offloads = training.enable_cpu_offload and mesh.device_type != "cpu"
    offload = CPUOffloadPolicy() if offloads else OffloadPolicy()
    reshard = mesh.degrees.reshard_after_forward
    for block in blocks:
        fully_shard(
            block,
            mesh=mesh.shard_axes,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=reshard,
        )
    # The root keeps its parameters (embedding and head): the backward pass begins with them.
    fully_shard(
        model,
        mesh=mesh.shard_axes,
        mp_policy=precision,
        offload_policy=offload,
        reshard_after_forward=False,
    )
    prefetch(blocks)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def prefetch(blocks: list[nn.Module]) -> None:
    """While a block computes, its neighbour is gathered: the next one in the forward pass, the one
    before in the backward pass."""
    for block, following in itertools.pairwise(blocks):
        assert isinstance(block, FSDPModule)
        assert isinstance(following, FSDPModule)
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def reshard(parts: Sequence[nn.Module]) -> None:
    """Frees parameters that a forward pass without a backward pass has left gathered."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def sync_gradients(model: nn.Module, last: bool) -> None:
    """Reduce gradients only in the last of several accumulated backward passes."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
