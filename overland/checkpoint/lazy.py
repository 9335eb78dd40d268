"""A checkpoint of any format, as a run sees it: tensors that are read when needed.

All of them are lazy: shape and dtype are known, bytes are read on demand. They are named like a
run's own state: `model.<Hugging Face name>`, `optimizer.<name>.<state>` (for AdamW: exp_avg and
exp_avg_sq), `optimizer.num_updates`. Everything else in a file keeps its name. The formats are in
overland/apps/convert/formats.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overland.checkpoint.origin import Origin
from overland.errors import CheckpointError
from overland.files import Moved, ignore
from overland.words import nearest_name

Shape = tuple[int, ...]
Slices = tuple[slice, ...]
Config = dict[str, Any] | None
"""The contents of a config.json, if there is one."""

MODEL, OPTIMIZER, NUM_UPDATES = "model.", "optimizer.", "optimizer.num_updates"
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state, as torch and DeepSpeed name it

_moved: ContextVar[Moved] = ContextVar("moved", default=ignore)


@contextmanager
def counting(moved: Moved) -> Iterator[None]:
    """Calls `moved` with the number of bytes whenever a file is read within this context."""
    before = _moved.set(moved)
    try:
        yield
    finally:
        _moved.reset(before)


def counter() -> Moved:
    """Returns the function that counts bytes read. A new thread does not inherit it, and must be
    given it."""
    return _moved.get()


@dataclass(frozen=True, eq=False)
class Lazy:
    """A tensor that is not in memory. By default reading a slice costs as much as the whole."""

    shape: Shape
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def load(self) -> Tensor:
        raise NotImplementedError

    def load_slice(self, slices: Slices) -> Tensor:
        return self.load()[slices]


@dataclass
class LazyCheckpoint:
    """What readers return and writers accept. `extras`: step, batch, tokens, best_validation_loss,
    learning rates and `param_groups` (torch's, with parameter names) if the format has them.
    `config`: the contents of a config.json. `companions`: tokenizer and generation config.
    `adapter`: the contents of an adapter_config.json, if there are adapters. `left_out`: weights
    that are needed but stored elsewhere."""

    format: str
    folder: Path
    tensors: dict[str, Lazy]
    extras: dict[str, Any] = field(default_factory=dict)
    config: Config = None
    companions: list[Path] = field(default_factory=list)
    adapter: Config = None
    left_out: Origin | None = None

    @property
    def own_model(self) -> str | None:
        """The config class of a run's model, if a user registered it."""
        name: str | None = (self.extras.get("run") or {}).get("own_model")
        return name

    def read(self, name: str) -> Tensor:
        """Returns the whole tensor, on the CPU."""
        return self._tensor(name).load()

    def read_slice(self, name: str, slices: Slices) -> Tensor:
        return self._tensor(name).load_slice(slices)

    def _tensor(self, name: str) -> Lazy:
        if name in self.tensors:
            return self.tensors[name]
        near = nearest_name(str(name), self.tensors)
        advice = f"did you mean {near!r}?" if near else "its `tensors` lists all of them"
        raise CheckpointError(f"{self.folder} has no tensor {name!r}; {advice}")

    def weights(self) -> dict[str, Lazy]:
        """Returns the model's tensors by their Hugging Face names."""
        return {
            name.removeprefix(MODEL): lazy
            for name, lazy in self.tensors.items()
            if name.startswith(MODEL)
        }

    def states(self) -> Iterator[tuple[str, str, Lazy]]:
        """Yields the optimizer state: (parameter, name of the state, tensor)."""
        for name, lazy in self.tensors.items():
            if (state := split_state(name, self.tensors)) is not None:
                yield *state, lazy

    def with_tensors(self, tensors: dict[str, Lazy]) -> LazyCheckpoint:
        return replace(self, tensors=tensors)


def split_state(name: str, tensors: Container[str]) -> tuple[str, str] | None:
    """Splits `optimizer.<parameter>.<state>`; None if there is no such parameter in the model."""
    parameter, _, kind = name.removeprefix(OPTIMIZER).rpartition(".")
    is_state = name.startswith(OPTIMIZER) and (MODEL + parameter in tensors or kind in MOMENTS)
    return (parameter, kind) if is_state else None
