"""Data parallelism with FSDP2: what is sharded over `dp_shard` and replicated over `dp_replicate`,
and when and in which dtype it is gathered and reduced. The stages are those of ZeRO (Rajbhandari et
al. 2020). The file also tells which part of a parameter is local.

    stage   dp_shard   reshard after forward
    zero0      1              –               every rank holds everything, as in classic DDP
    zero2      n             no               parameters stay gathered until the backward pass
    zero3      n            yes               gathered again for the backward pass

Gradients are summed, not averaged: the loss is already divided by the number of tokens in the
global batch.

A single device is not sharded at all. FSDP would copy parameters there through the buffers of its
collectives, twice a step, and return gradients in the same way: 42 bytes of wasted traffic per
parameter and step.

A float32 parameter that is computed in bfloat16 *is* a bfloat16 number there, and the optimizer
keeps its 16-bit remainder (see master_weights.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from types import SimpleNamespace

import torch
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from overland.config.derived import HALVES, is_unsharded
from overland.config.schema import JobConfig
from overland.kernels.bfloat16 import Places
from overland.models.init import persistent_buffers, plain_name
from overland.models.structure import find_module, structure_of, ties_of
from overland.parallel.in_place import without_copies
from overland.parallel.mesh import Mesh

HEAD_APART = False  # until it is timed on GPUs
IN_PLACE = False  # until it is timed on GPUs
SPLIT_SHARDS = False  # until it is timed on GPUs: float32 shards are cast as they are gathered


def _allow_integers() -> None:
    """Makes FSDP of torch 2.11 take parameters of integers (weights in 4 bits, the masks of sparse
    layers) as later versions do: it would let each have a gradient, which torch refuses, and cast
    it."""
    of_floats = FSDPParam.init_dtype_attrs

    def parameter(data: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    def init_dtype_attrs(self: FSDPParam, policy: MixedPrecisionPolicy) -> None:
        is_cast = self.sharded_param.is_floating_point()
        of_floats(self, policy if is_cast else MixedPrecisionPolicy())

    fsdp_param.nn = SimpleNamespace(Parameter=parameter, Module=nn.Module)  # type: ignore[assignment]
    FSDPParam.init_dtype_attrs = init_dtype_attrs  # type: ignore[assignment]


if torch.__version__ < "2.12":
    _allow_integers()


def shard(model: nn.Module, blocks: list[nn.Module], mesh: Mesh, config: JobConfig) -> None:
    """Shards each block separately, so that the next one is gathered while this one computes."""
    if is_single(mesh, config):
        return
    training = config.training
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,
    )
    # On a CPU everything is already in host memory.
    offloads = training.enable_cpu_offload and mesh.device_type != "cpu"
    offload = CPUOffloadPolicy() if offloads else OffloadPolicy()
    split = partial(fully_shard, mesh=mesh.shard_axes, mp_policy=precision, offload_policy=offload)
    for block in blocks:
        split(block, reshard_after_forward=mesh.degrees.reshard_after_forward)
    # The head and the root (the embedding) keep their parameters: the backward pass begins with
    # those of the head.
    head = own_head(model) if HEAD_APART else []
    for module in head:
        split(module, reshard_after_forward=False)
    split(model, reshard_after_forward=False)
    prefetch([*blocks, *head])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if IN_PLACE:
                without_copies(module)


def own_head(model: nn.Module) -> list[nn.Module]:
    """Returns the output matrix's module, unless its matrix is also the embedding's: sharded by
    itself, it is gathered while the last block computes, and its gradient is reduced while the
    blocks' are computed."""
    structure = structure_of(model)
    if not structure.blocks or not structure.last_stage or structure.ties:
        return []
    last = find_module(model, structure.last_stage[-1])
    return [] if last is None else [last]


def prefetch(blocks: list[nn.Module]) -> None:
    """Makes FSDP gather the neighbor of a block while it computes: the next one in the forward
    pass, the previous one in the backward pass."""
    for block, following in itertools.pairwise(blocks):
        assert isinstance(block, FSDPModule)
        assert isinstance(following, FSDPModule)
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def reshard(parts: Sequence[nn.Module]) -> None:
    """Frees parameters that stayed gathered after a forward pass without a backward pass."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def sync_gradients(model: nn.Module, last: bool) -> None:
    """Makes FSDP reduce gradients only in the last of several accumulated backward passes."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)


def is_single(mesh: Mesh, config: JobConfig) -> bool:
    """Whether a model runs without FSDP."""
    return is_unsharded(config, mesh.degrees)


def splits(mesh: Mesh, config: JobConfig) -> bool:
    """Whether parameters are bfloat16, with their remainders as master weights in the optimizer.
    Offloaded ones are updated by the CPU, as float32."""
    kinds = (config.training.dtype, config.training.mixed_precision_param)
    is_sharded = SPLIT_SHARDS and not config.training.enable_cpu_offload
    return kinds == HALVES and (is_single(mesh, config) or is_sharded)


def fix_gradient_dtype(parts: Sequence[nn.Module]) -> None:
    """Makes FSDP return gradients in the present dtype of the parameters, even if they become
    narrower: it would round the sums to their dtype at the first forward pass."""
    for part in parts:
        if isinstance(part, FSDPModule):
            part._get_fsdp_state()._lazy_init()


def shard_owners(parts: Sequence[nn.Module]) -> dict[nn.Parameter, FSDPParam]:
    """Returns what FSDP knows of each parameter that it shards."""
    modules = [module for part in parts for module in part.modules()]
    states = [one._get_fsdp_state() for one in modules if isinstance(one, FSDPModule)]
    groups = [state._fsdp_param_group for state in states]
    return {one.sharded_param: one for group in groups if group for one in group.fsdp_params}


def store_shard(
    parameter: nn.Parameter, shard: torch.Tensor, owners: Mapping[nn.Parameter, FSDPParam]
) -> None:
    """Makes a tensor, which may have another dtype than before, what this rank holds of a
    parameter, and what is gathered from now on."""
    if not isinstance(parameter, DTensor):
        parameter.data = shard
        return
    assert parameter._spec.tensor_meta is not None
    meta = parameter._spec.tensor_meta._replace(dtype=shard.dtype)
    spec = replace(parameter._spec, tensor_meta=meta)
    parameter.data = DTensor(shard, spec, requires_grad=False)  # changes only the outer dtype
    parameter._local_tensor, parameter._spec = shard, spec
    if owner := owners.get(parameter):
        of_gradients, wanted = owner._sharding_spec, owner.mp_policy.param_dtype
        owner.reset_sharded_param()
        owner._sharding_spec = of_gradients
        owner.param_dtype = None if shard.dtype == wanted else wanted  # None: nothing is cast


def local_part(
    parameter: torch.Tensor,
) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """Returns (the tensor to fill, its offset in the whole parameter, the whole parameter's
    shape)."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.ndim, tuple(parameter.shape)
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), tuple(offset), tuple(parameter.shape)


def places_of_shard(parameter: torch.Tensor) -> Places:
    """Returns where the elements on this rank are in the whole parameter, of which at most its
    first two dimensions are split."""
    shard, offset, whole = local_part(parameter)
    if len(whole) < 2 or shard.shape[1] == whole[1]:
        return Places(offset[0] * prod(whole[1:]) if whole else 0)
    assert tuple(shard.shape[2:]) == whole[2:]
    stride, below = prod(whole[1:]), prod(whole[2:])
    return Places(offset[0] * stride + offset[1] * below, shard.shape[1] * below, stride)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local part, as a plain tensor that shares memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def named_parameters(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Returns the parameters of this rank's parts by their name in the unsplit model."""
    return {name: found[0] for name, found in _by_name(parts).items()}


def named_buffers(parts: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Returns the buffers of this rank's parts that belong to the model's state, by their name in
    the unsplit model. Every rank that has such a module holds them completely."""
    return {name: buffer for part in parts for name, buffer in persistent_buffers(part).items()}


def names_by_parameter(parts: Sequence[nn.Module]) -> dict[nn.Parameter, str]:
    """Returns the names of this rank's parameters; copies of a tied matrix have one name."""
    return {parameter: name for name, found in _by_name(parts).items() for parameter in found}


def tied_copies(parts: Sequence[nn.Module]) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Returns (parameter, its copy) if both ends of a pipeline, and so both copies of a tied
    matrix, are on this rank."""
    return [(found[0], copy) for found in _by_name(parts).values() for copy in found[1:]]


def _by_name(parts: Sequence[nn.Module]) -> dict[str, list[nn.Parameter]]:
    found: dict[str, list[nn.Parameter]] = {}
    for part in parts:
        ties = ties_of(part)
        for wrapped_name, parameter in part.named_parameters():
            name = plain_name(wrapped_name)
            # A tied parameter may be alone, on the last stage of a pipeline.
            found.setdefault(ties.get(name, name), []).append(parameter)
    return found
