"""A parameter's shard on this rank, as an update reads and writes it.

Values are converted to float32 or wider for the update: a split master weight is joined, a gradient
is divided by the loss scale and the clipping factor, low-precision or packed state is unpacked.
Afterwards they are converted back, unless the step is skipped; that is decided on the device, so
the host never waits to learn whether a step was good.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from overland.errors import OptimizerError
from overland.kernels.bfloat16 import (
    WHOLE,
    Places,
    join,
    random_bits,
    round_stochastically,
    split,
)
from overland.optimizers.rule import (
    LARGEST_BLOCK,
    Elementwise,
    Packed,
    Rates,
    Rule,
    Scalar,
    StateKinds,
)

# An update needs dozens of bytes per element for temporaries: tens of GB for a whole embedding.
PIECE = LARGEST_BLOCK


@dataclass(frozen=True)
class Step:
    """One step of the optimizer. The tensors are scalars on the device."""

    lr: float
    num_updates: Tensor  # including this one; float32
    divisor: Tensor  # of the gradients; float64 if a parameter is
    skip: Tensor  # if not zero, nothing changes; float32

    @cached_property
    def is_skipped(self) -> Tensor:
        return self.skip != 0


@dataclass(slots=True)  # not frozen: creating some hundreds per step takes half the time
class ParameterShard:
    name: str
    parameter: Tensor  # bfloat16 with a remainder, otherwise in its own dtype
    remainder: Tensor | None  # int16: the lower half of a split master weight
    gradient: Tensor
    kinds: StateKinds
    state: Mapping[str, Tensor]
    packed: Mapping[str, tuple[Tensor, ...]]
    lr_factor: float
    weight_decay: float
    seed: int  # for stochastic rounding
    places: Places = WHOLE
    start: int = 0  # where this piece begins in its shard

    def rates(self, step: Step) -> Rates:
        count = step.num_updates.to(self._wide)
        return Rates(step.lr * self.lr_factor, self.weight_decay, count)

    def pieces(self) -> Iterator[ParameterShard]:
        """Yields the shard in flat pieces of limited size; an empty shard is one piece."""
        flat = {
            name: one if isinstance(self.kinds[name], Scalar) else one.view(-1)
            for name, one in self.state.items()
        }
        parameter, gradient = self.parameter.view(-1), self.gradient.reshape(-1)
        remainder = None if self.remainder is None else self.remainder.view(-1)
        for start in range(0, max(1, parameter.numel()), PIECE):
            here = slice(start, start + PIECE)
            yield replace(
                self,
                parameter=parameter[here],
                remainder=None if remainder is None else remainder[here],
                gradient=gradient[here],
                state={name: one[here] if one.ndim else one for name, one in flat.items()},
                packed={name: self._blocks(name, here) for name in self.packed},
                start=start,
            )

    def wide_parameter(self) -> Tensor:
        if self.remainder is not None:
            return join(self.parameter, self.remainder)
        return self.parameter.to(self._wide)

    def wide_gradient(self, step: Step) -> Tensor:
        return self.gradient.to(self._wide) / step.divisor

    def wide_state(self) -> dict[str, Tensor]:
        found = {
            name: one if isinstance(self.kinds[name], Scalar) else one.to(self._wide)
            for name, one in self.state.items()
        }
        for name, kept in self.packed.items():
            numbers = unpacked(self._packing(name), kept, self.parameter.shape)
            found[name] = numbers.to(self._wide)
        return found

    def write_parameter(self, new: Tensor, step: Step) -> None:
        self._require_shape("parameter", new, self.parameter.shape)
        if self.remainder is None:
            _write(self.parameter, new, step)
            return
        narrow, remainder = split(new)
        _write(self.parameter, narrow, step)
        _write(self.remainder, remainder, step)

    def write_state(self, new: Mapping[str, Tensor], step: Step) -> None:
        """Writes everything except scalars, which all pieces of a shard read."""
        if missing := [name for name in self.kinds if name not in new]:
            raise OptimizerError(f"the update of {self.name} did not return a new {missing[0]}")
        for name, one in self.state.items():
            if isinstance(self.kinds[name], Scalar):
                continue
            value = new[name]
            self._require_shape(name, value, one.shape)
            if one.dtype == torch.bfloat16 and value.dtype != torch.bfloat16:
                seed = self.seed ^ crc32(name.encode()) >> 1
                size, count = value.numel(), step.num_updates
                bits = random_bits(size, count, seed, self.start, self.places)
                value = round_stochastically(value.float(), bits & 0xFFFF)
            _write(one, value, step)
        for name, kept in self.packed.items():
            self._require_shape(name, new[name], self.parameter.shape)
            for one, value in zip(kept, packed(self._packing(name), new[name]), strict=True):
                _write(one, value, step)

    def write_scalars(self, new: Mapping[str, Tensor], step: Step) -> None:
        for name, one in self.state.items():
            if isinstance(self.kinds[name], Scalar):
                self._require_shape(name, new[name], one.shape)
                _write(one, new[name], step)

    def _require_shape(self, what: str, new: Tensor, shape: torch.Size) -> None:
        """Raises for another shape: it would be broadcast, or would not fit."""
        found = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
        if found != tuple(shape):
            raise OptimizerError(
                f"the update of {self.name} returned {found} as its new {what}, expected a tensor "
                f"of shape {tuple(shape)}"
            )

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.parameter.dtype, torch.float32)

    def _packing(self, name: str) -> Packed:
        kind = self.kinds[name]
        assert isinstance(kind, Packed)
        return kind

    def _blocks(self, name: str, here: slice) -> tuple[Tensor, ...]:
        block = self._packing(name).block
        assert PIECE % block == 0  # both are powers of two
        return tuple(kept[here.start // block : here.stop // block] for kept in self.packed[name])


@contextmanager
def unchanged(rule: Rule, method: str, *given: Tensor) -> Iterator[None]:
    """Raises if a rule writes into its arguments: some of them are the parameter and the state
    themselves, which a skipped step must leave unchanged."""
    before = [tensor._version for tensor in given]
    yield
    if [tensor._version for tensor in given] != before:
        raise OptimizerError(
            f"{type(rule).__name__}.{method}() changes one of its arguments in place: compute new "
            "tensors, and return those"
        )


def pair(rule: Rule, method: str, result: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Returns the result of a rule; raises unless it is a tensor and state by name."""
    is_pair = isinstance(result, tuple) and len(result) == 2
    if is_pair and isinstance(result[0], Tensor) and isinstance(result[1], Mapping):
        return result
    raise OptimizerError(
        f"{type(rule).__name__}.{method}() must return a tensor and the state as a dict"
    )


def packed(kind: Packed, numbers: Tensor) -> tuple[Tensor, ...]:
    """Packs the values."""
    flat = numbers.float().reshape(-1)
    filled = torch.nn.functional.pad(flat, (0, -flat.numel() % kind.block))
    return kind.pack(filled.view(-1, kind.block))


def unpacked(kind: Packed, kept: tuple[Tensor, ...], shape: torch.Size) -> Tensor:
    """Returns the unpacked values, in float32."""
    return kind.unpack(*kept).reshape(-1)[: shape.numel()].view(shape)


def _write(place: Tensor, new: Tensor, step: Step) -> None:
    place.copy_(torch.where(step.is_skipped, place, new.to(place.dtype)))


def update_in_pieces(rule: Elementwise, shards: Sequence[ParameterShard], step: Step) -> None:
    for shard in shards:
        rates = shard.rates(step)
        for piece in shard.pieces():
            given, kept = piece.wide_parameter(), piece.wide_state()
            with unchanged(rule, "update", given, *kept.values()):
                result = rule.update(given, piece.wide_gradient(step), kept, rates)
            parameter, state = pair(rule, "update", result)
            piece.write_parameter(parameter, step)
            piece.write_state(state, step)
        shard.write_scalars(state, step)
