"""Which part of a parameter lies here."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


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
