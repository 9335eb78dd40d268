"""Descriptions of what an optimizer keeps of a parameter. All of it starts at zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}

# An update works in pieces of this many numbers, which hold whole blocks.
LARGEST_BLOCK = 2**23


@dataclass(frozen=True)
class Like:
    """A tensor of the parameter's shape, sharded as the parameter is.

    `dtype` is the parameter's own unless given. bfloat16 is rounded stochastically, so that slow
    averages stay unbiased.
    """

    dtype: str | None = None


@dataclass(frozen=True)
class Scalar:
    """One number per parameter, the same on every rank that holds a part of it."""

    dtype: str = "float32"


@dataclass(frozen=True)
class Packed:
    """A tensor of the parameter's shape that is kept in fewer bytes, such as 8 bits per number with
    a scale per block.

    The numbers of a shard are cut into blocks, the last one filled up with zeros. `pack` takes a
    float32 tensor [blocks, block] and returns the tensors to keep, whose first dimension counts the
    blocks; `unpack` takes those and returns the numbers. Checkpoints hold the unpacked numbers in
    float32, so that any layout, and any other way of packing, can read them.
    """

    pack: Callable[[Tensor], tuple[Tensor, ...]]
    unpack: Callable[..., Tensor]
    block: int
    bytes_per_number: float
    """For estimates of memory."""


Kind = Like | Scalar | Packed
Kinds = Mapping[str, Kind]


def wrong_kind(kind: object) -> str:
    """What is wrong with a description of state, if anything."""
    if isinstance(kind, Packed):
        is_power = isinstance(kind.block, int) and kind.block > 0 and kind.block.bit_count() == 1
        if not is_power or kind.block > LARGEST_BLOCK:
            return f"a block of {kind.block} numbers is not a power of two up to {LARGEST_BLOCK}"
        return ""
    if not isinstance(kind, Like | Scalar):
        return f"{kind!r} is none of Like(), Scalar() and Packed()"
    if kind.dtype not in SIZES and not (kind.dtype is None and isinstance(kind, Like)):
        return f"the type {kind.dtype!r} is none of {', '.join(SIZES)}"
    return ""


def num_bytes(kinds: Kinds, shape: tuple[int, ...], dtype: str) -> float:
    """Bytes in memory for the state of a parameter of this shape and type."""
    total = 0.0
    for kind in kinds.values():
        if isinstance(kind, Scalar):
            total += SIZES[kind.dtype]
        elif isinstance(kind, Packed):
            total += prod(shape) * kind.bytes_per_number
        else:
            total += prod(shape) * SIZES[kind.dtype or dtype]
    return total


def num_saved_bytes(kinds: Kinds, shape: tuple[int, ...], dtype: str) -> int:
    """Bytes in a checkpoint, which holds packed state unpacked."""
    saved = {
        name: Like("float32") if isinstance(kind, Packed) else kind for name, kind in kinds.items()
    }
    return int(num_bytes(saved, shape, dtype))
