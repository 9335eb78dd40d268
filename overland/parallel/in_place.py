"""FSDP's collectives without its copies.

FSDP2 gathers a block into one buffer, whose parts it then copies into the parameters, and copies
all gradients into another, row by row, from which they are reduced: 14 bytes of traffic per
parameter and step. Here each parameter is a collective of its own in one launch: it is gathered
where it is used, and its gradient is converted once, as a whole. Numbers, buffers of gradients and
bytes on the wire are the same.

What is gathered is allocated by the stream that computes, when the gather is asked for; so the
gather begins after all that was asked of that stream before. Blocks must thus be prefetched
explicitly: the next one is asked for before the present one computes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    AllGatherResult,
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

# Their names before torch 2.13.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_gather, _copy_out = param_group.foreach_all_gather, param_group.foreach_all_gather_copy_out
_copy_in = collectives.foreach_reduce_scatter_copy_in


def without_copies(module: FSDPModule) -> None:
    """Makes FSDP use these collectives for a module's parameters."""
    module.set_custom_all_gather(GatherInPlace())
    module.set_custom_reduce_scatter(ReduceByParameter())
    param_group.foreach_all_gather = gather  # type: ignore[assignment]
    param_group.foreach_all_gather_copy_out = copy_out  # type: ignore[assignment]
    collectives.foreach_reduce_scatter_copy_in = copy_in  # type: ignore[assignment]


class GatherInPlace(DefaultAllGather):
    """Tells `gather` that it may."""


class Gathered(AllGatherResult):
    """What needs no copy."""


@torch.no_grad()
def gather(
    params: list[FSDPParam],
    group: dist.ProcessGroup,
    async_op: bool,
    copy_in_stream: torch.Stream,
    stream: torch.Stream,
    device: torch.device,
    comm: Any,
) -> AllGatherResult | None:
    """In place of FSDP's `foreach_all_gather`, which still gathers what is offloaded or split along
    another dimension."""
    if async_op or not isinstance(comm, GatherInPlace) or not all(map(_is_plain, params)):
        return _gather(params, group, async_op, copy_in_stream, stream, device, comm)
    handle = torch.get_device_module(device)
    stream.wait_stream(handle.current_stream())
    with handle.stream(stream):
        shards = [one for (one,) in collectives._get_param_all_gather_inputs(params)]
    outputs = []
    for param, shard in zip(params, shards, strict=True):
        param.init_all_gather_outputs([shard.numel()], [shard.dtype], group.size(), device)
        param.alloc_all_gather_outputs()
        outputs += param.all_gather_outputs
    counted = tuple(one for one in outputs if not one.is_inference())
    with handle.stream(stream), torch.autograd._unsafe_preserve_version_counter(counted):
        with one_launch(group, outputs[0]):
            for output, shard in zip(outputs, shards, strict=True):
                _all_gather(output, shard, group)
        event = stream.record_event()
    return Gathered(outputs[0], event, None, [], [], [])


def _is_plain(param: FSDPParam) -> bool:
    is_here = param.sharded_state == ShardedState.SHARDED and not param.offload_to_cpu
    return is_here and param.fsdp_placement.dim == 0


def copy_out(result: AllGatherResult, params: list[FSDPParam], group: dist.ProcessGroup) -> None:
    """In place of FSDP's `foreach_all_gather_copy_out`."""
    if not isinstance(result, Gathered):
        _copy_out(result, params, group)
        return
    if result.all_gather_event is not None:  # none on a CPU
        handle = torch.get_device_module(result.all_gather_output.device)
        handle.current_stream().wait_event(result.all_gather_event)


class ReduceByParameter(DefaultReduceScatter):
    """Reduces the parts of a buffer that `copy_in` has filled, one per parameter."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = super().allocate(size, dtype=dtype, device=device)
        buffer.parts = []  # type: ignore[attr-defined]
        return buffer

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        parts: list[int] = input_tensor.parts  # type: ignore[attr-defined]
        ends = output_tensor.split([size // group.size() for size in parts])
        with one_launch(group, input_tensor):
            for mine, part in zip(ends, input_tensor.split(parts), strict=True):
                _reduce_scatter(mine, part, op, group)


def copy_in(gradients: list[Tensor], buffer: Tensor, world_size: int) -> None:
    """In place of FSDP's `foreach_reduce_scatter_copy_in`: one parameter after the other, each with
    zeros for the rows that the last ranks lack."""
    if not hasattr(buffer, "parts"):
        _copy_in(gradients, buffer, world_size)
        return
    start = 0
    for gradient in gradients:
        size = collectives._get_dim0_padded_size(gradient.size(), world_size).numel()
        end = start + gradient.numel()
        buffer[start:end].view(gradient.shape).copy_(gradient)
        buffer[end : start + size].zero_()
        buffer.parts.append(size)
        start += size


def one_launch(group: dist.ProcessGroup, tensor: Tensor) -> AbstractContextManager[Any]:
    """Makes the collectives in it one; on a CPU nothing is launched."""
    return dist._coalescing_manager(group) if tensor.is_cuda else nullcontext()
