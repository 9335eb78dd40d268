"""Which parameters, and which part of each, lie on this rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from overland.models.buffers import persistent_buffers
from overland.models.init import plain_name
from overland.models.structure import ties_of


def local_part(
    parameter: torch.Tensor,
) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """(the tensor to fill, its offset in the whole parameter, the whole parameter's shape)."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.ndim, tuple(parameter.shape)
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), tuple(offset), tuple(parameter.shape)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers that lie here, as a plain tensor on the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def named_parameters(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of this rank's parts by their name in the undivided model."""
    return {name: found[0] for name, found in _by_name(parts).items()}


def named_buffers(parts: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """The buffers of this rank's parts that belong to the model's state, by their name in the
    undivided model. Every rank that has such a module holds them whole."""
    return {name: buffer for part in parts for name, buffer in persistent_buffers(part).items()}


def parameter_names(parts: Sequence[nn.Module]) -> dict[nn.Parameter, str]:
    """The same the other way round: copies of a tied matrix have one name."""
    return {parameter: name for name, found in _by_name(parts).items() for parameter in found}


def tied_copies(parts: Sequence[nn.Module]) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """(parameter, its copy) where both ends of a pipeline, and so both copies of a tied matrix,
    are on this rank."""
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
