"""Update rules: what an optimizer defines, elementwise or per whole matrix (for one like Muon), and
the kinds of state it keeps. Rules are independent of ranks, devices and number formats.

Tensors are float32, or wider if the parameters are. What a rule returns replaces the old values; if
a step must be skipped, the framework does so on the device. All state starts at zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    State = Mapping[str, Tensor]


BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}

# An update works on pieces of this many elements, which hold whole blocks.
LARGEST_BLOCK = 2**23


@dataclass(frozen=True)
class Rates:
    """The rates of a parameter's group in this step."""

    lr: float
    weight_decay: float
    num_updates: Tensor
    """The number of updates so far, including this one: a scalar on the device, float32 or
    wider."""


class Rule:
    """What both kinds of rule have in common."""

    def takes(self, name: str, shape: Sequence[int]) -> bool:
        """Returns whether this rule updates the parameter of this name and (whole) shape."""
        return True

    def state(self, name: str, shape: Sequence[int]) -> StateKinds:
        """Returns the kinds of state that are kept of such a parameter, by name."""
        return {}


class Elementwise(Rule):
    """A rule that updates every element independently, so it can work on a shard or a piece of
    one."""

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, rates: Rates
    ) -> tuple[Tensor, State]:
        """Returns the new parameter and its new state. The tensors may have any shape."""
        raise NotImplementedError


class WholeMatrix(Rule):
    """A rule whose update of a matrix depends on the whole matrix, such as an orthogonal factor.
    `before` and `after` run on shards; between them, `whole` runs once per matrix, on the rank that
    owns it."""

    others = "AdamW"
    """The optimizer of the parameters that this one does not take, with its own keys and options as
    set in [optimizer]."""

    def takes(self, name: str, shape: Sequence[int]) -> bool:
        """Returns whether it is a matrix inside a block: not an embedding or the head, which are
        tables of rows."""
        return len(shape) == 2 and not any(word in name for word in ("embed", "lm_head"))

    def before(self, gradient: Tensor, state: State, rates: Rates) -> tuple[Tensor, State]:
        """Returns the local part of the matrix for `whole`, and the new state. It is sent in its
        own dtype."""
        return gradient, state

    def whole(self, matrix: Tensor) -> Tensor:
        """Returns the direction, in the shape of the matrix. It is sent back in the same dtype."""
        raise NotImplementedError

    def after(
        self, parameter: Tensor, direction: Tensor, state: State, rates: Rates
    ) -> tuple[Tensor, State]:
        """Returns the new parameter and its new state, or the same state if it does not change."""
        raise NotImplementedError


@dataclass(frozen=True)
class Like:
    """A tensor with the parameter's shape and sharding.

    `dtype` defaults to that of the parameter. bfloat16 is rounded stochastically, so that slow
    averages stay unbiased.
    """

    dtype: str | None = None


@dataclass(frozen=True)
class Scalar:
    """One number per parameter, the same on every rank that holds a part of it. `dtype` defaults
    to float32, or float64 if the parameter is."""

    dtype: str | None = None


@dataclass(frozen=True)
class Packed:
    """A tensor of the parameter's shape that is stored in fewer bytes, such as 8 bits per element
    with a scale per block.

    The elements of a shard are divided into blocks, the last one padded with zeros. `pack` takes a
    float32 tensor [blocks, block] and returns the tensors to keep, whose first dimension counts the
    blocks; `unpack` takes those and returns the elements. So which elements share a block, and how
    they are rounded, depends on the sharding. Checkpoints hold the unpacked elements in
    float32, so that any layout, and any other way of packing, can read them.
    """

    pack: Callable[[Tensor], tuple[Tensor, ...]]
    unpack: Callable[..., Tensor]
    block: int
    bytes_per_number: float
    """For estimates of memory."""


StateKind = Like | Scalar | Packed
StateKinds = Mapping[str, StateKind]


def wrong_kind(kind: object) -> str:
    """Returns what is wrong with a kind of state, or an empty string."""
    if isinstance(kind, Packed):
        is_power = isinstance(kind.block, int) and kind.block > 0 and kind.block.bit_count() == 1
        if not is_power or kind.block > LARGEST_BLOCK:
            return f"a block of {kind.block} elements is not a power of two up to {LARGEST_BLOCK}"
        return ""
    if not isinstance(kind, Like | Scalar):
        return f"{kind!r} is not one of Like(), Scalar() and Packed()"
    if kind.dtype not in (None, *BYTES):
        return f"the dtype {kind.dtype!r} is not one of {', '.join(BYTES)}"
    return ""


def num_bytes(kinds: StateKinds, shape: tuple[int, ...], dtype: str, saved: bool = False) -> float:
    """Returns the bytes for the state of a parameter of this shape and dtype: in memory, or in a
    checkpoint, where packed state is unpacked to float32."""
    total = 0.0
    for kind in kinds.values():
        if isinstance(kind, Scalar):
            total += BYTES[kind.dtype] if kind.dtype else max(4, BYTES[dtype])
        elif isinstance(kind, Packed):
            total += prod(shape) * (BYTES["float32"] if saved else kind.bytes_per_number)
        else:
            total += prod(shape) * BYTES[kind.dtype or dtype]
    return total
