"""Fills a model with weights from their files: a checkpoint of a run, or any other format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from overland.apps.convert.formats import LazyCheckpoint
from overland.apps.convert.formats.overland import require_readable
from overland.checkpoint.lazy import MODEL, Lazy, Origin, counting
from overland.checkpoint.read import fill, open_checkpoint
from overland.errors import CheckpointError
from overland.files import Moved, ignore
from overland.models.init import LocalPart, persistent_buffers, plain_name, whole
from overland.models.structure import ties_of
from overland.models.weights import load_hf


class Weights(Protocol):
    def fill(self, model: nn.Module, local_part: LocalPart = whole, moved: Moved = ignore) -> None:
        """Fills an allocated model, or the parts of it that are on this rank."""


@dataclass(frozen=True)
class RunWeights:
    """Weights of a run's checkpoint. `base` is where to look for frozen weights that it omits."""

    checkpoint: Path
    base: Path | None = None

    def fill(self, model: nn.Module, local_part: LocalPart = whole, moved: Moved = ignore) -> None:
        named = {plain_name(name): one.detach() for name, one in model.named_parameters()}
        with open_checkpoint(self.checkpoint, moved) as saved:
            require_readable(saved)
            origin = Origin.from_json(saved.run)
            if origin is not None:
                folder = origin.find([self.base] if self.base is not None else [])
                load_hf(model, folder, local_part, False, moved, only=origin.names)
                named = {name: one for name, one in named.items() if name not in origin.names}
            state = {MODEL + name: one for name, one in named.items()}
            buffers = {MODEL + name: one for name, one in persistent_buffers(model).items()}
            state |= {name: one for name, one in buffers.items() if name in saved.tensors}
            fill(saved, state)


@dataclass(frozen=True)
class FileWeights:
    """Weights in files of any format, with adapters merged."""

    source: LazyCheckpoint

    def fill(self, model: nn.Module, local_part: LocalPart = whole, moved: Moved = ignore) -> None:
        weights, ties = self.source.weights(), ties_of(model)
        buffers = {n: b for n, b in persistent_buffers(model).items() if n in weights}
        named = {plain_name(name): one for name, one in model.named_parameters()} | buffers
        alike = {owner: tied for tied, owner in ties.items()}
        with counting(moved), torch.no_grad():
            for name, tensor in named.items():
                owner = ties.get(name, name)
                lazy = weights.get(owner) or weights.get(alike.get(owner, ""))
                if lazy is None:
                    raise CheckpointError(
                        f"{self.source.folder} lacks {name}, which its config.json requires"
                    )
                _copy(lazy, name, tensor, local_part, self.source.folder)


def _copy(lazy: Lazy, name: str, tensor: Tensor, local_part: LocalPart, folder: Path) -> None:
    target, offsets, shape = local_part(tensor)
    if lazy.shape != tuple(shape):
        raise CheckpointError(
            f"{folder} has {name} with shape {list(lazy.shape)}, but its config.json requires "
            f"{list(shape)}"
        )
    if target.shape == tensor.shape:
        target.copy_(lazy.load())
    elif target.numel():
        ends = (start + size for start, size in zip(offsets, target.shape, strict=True))
        target.copy_(lazy.load_slice(tuple(map(slice, offsets, ends))))
