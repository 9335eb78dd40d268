"""The format of matrices stored in 4 bits (NF4 of QLoRA): the levels, and one scale per 64 weights;
models/nf4.py decides which matrices have it. NF4 is by Dettmers et al. 2023.

Weights are approximately normally distributed, so the 16 levels are quantiles of the normal
distribution. Every 64 weights of a row share a scale, the largest of their absolute values. A row
is stored as

    columns / 2 bytes     two weights each, the first one in the upper half
    columns / 32 bytes    scales, in bfloat16

Rows are independent: however they are sharded, the weights are the same. (QLoRA also quantizes the
scales, using their mean over the whole matrix, to save 3 % of these bytes.)
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

from overland.errors import ModelError
from overland.kernels import triton_takes

BLOCK = 64  # weights that share a scale


def _levels() -> tuple[float, ...]:
    """Returns eight levels above zero, zero itself, and seven below it."""
    outermost = (1 - 1 / 32 + 1 - 1 / 30) / 2

    def quantiles(count: int) -> list[float]:
        step = (outermost - 0.5) / count
        return [NormalDist().inv_cdf(outermost - step * i) for i in range(count)]

    above, below = quantiles(8), quantiles(7)
    return tuple(sorted(value / above[0] for value in [*above, 0.0, *(-one for one in below)]))


LEVELS = _levels()


def pack(weight_OD: Tensor) -> Tensor:
    """Returns rows of weights as bytes."""
    blocks_OnB = weight_OD.float().unflatten(1, (-1, BLOCK))
    scales_On = blocks_OnB.abs().amax(dim=2).bfloat16()
    if not bool(scales_On.isfinite().all()):
        raise ModelError("some weights are not finite, so they cannot be stored in 4 bits")
    divisors_On = scales_On.float().where(scales_On != 0, 1.0)
    levels = _levels_on(weight_OD.device)
    between = (levels[1:] + levels[:-1]) / 2
    codes_OD = torch.bucketize(blocks_OnB / divisors_On[:, :, None], between).byte().flatten(1)
    pairs = codes_OD[:, 0::2] << 4 | codes_OD[:, 1::2]
    return torch.cat((pairs, scales_On.view(torch.uint8)), dim=1)


def unpack(packed: Tensor, dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    """Returns the weights. `after` is a tensor that they are needed after: without it, the compiler
    would unpack them only once, and keep them from the forward to the backward pass."""
    weight_OD: Tensor = torch.ops.overland.nf4_unpack(packed, dtype, after)
    return weight_OD


def row_bytes(columns: int) -> int:
    return columns // 2 + columns // BLOCK * 2


@cache
def _levels_on(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, device=device)


def columns_of(packed: Tensor) -> int:
    return packed.shape[1] * BLOCK // row_bytes(BLOCK)


def unpack_plain(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Defines `unpack`."""
    columns = columns_of(packed)
    pairs, scales = packed[:, : columns // 2], packed[:, columns // 2 :]
    codes_OD = torch.stack((pairs >> 4, pairs & 15), dim=2).flatten(1)
    blocks_OnB = _levels_on(packed.device)[codes_OD.int()].unflatten(1, (-1, BLOCK))
    scales_On = scales.contiguous().view(torch.bfloat16).float()
    return (blocks_OnB * scales_On[:, :, None]).flatten(1).to(dtype)


@torch.library.custom_op("overland::nf4_unpack", mutates_args=())
def _unpack(packed: Tensor, dtype: torch.dtype, after: Tensor | None) -> Tensor:
    if triton_takes(packed, "nf4"):
        from overland.kernels.triton_kernels import unpack_triton

        columns, levels = columns_of(packed), _levels_on(packed.device)
        return unpack_triton(packed, columns, levels, BLOCK, dtype)
    return unpack_plain(packed, dtype)


@_unpack.register_fake
def _(packed: Tensor, dtype: torch.dtype, after: Tensor | None) -> Tensor:
    return packed.new_empty((packed.shape[0], columns_of(packed)), dtype=dtype)
