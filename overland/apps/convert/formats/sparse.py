"""Converts sparse matrices (models/sparse.py) to dense ones, with zeros where they are masked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from overland.checkpoint.lazy import MODEL, Lazy, LazyCheckpoint
from overland.errors import CheckpointError
from overland.models.sparse import MASK, masked


@dataclass(frozen=True, eq=False)
class Masked(Lazy):
    weight: Lazy
    mask: Lazy

    def load(self) -> Tensor:
        return masked(self.weight.load(), self.mask.load(), self.shape[1] // self.mask.shape[1])


def has_masks(names: Iterable[str]) -> bool:
    return any(name.endswith(f".{MASK}") for name in names)


def densify(source: LazyCheckpoint) -> LazyCheckpoint:
    """Returns the checkpoint with its masks applied to the weights."""
    if not has_masks(source.tensors):
        return source
    found = {name: lazy for name, lazy in source.tensors.items() if not name.endswith(f".{MASK}")}
    for name, mask in source.tensors.items():
        if not (name.startswith(MODEL) and name.endswith(f".{MASK}")):
            continue
        key = f"{name.removesuffix(MASK)}weight"
        weight = found.get(key)
        if weight is None or weight.shape[:1] != mask.shape[:1] or weight.shape[1] % mask.shape[1]:
            raise CheckpointError(f"{source.folder} has {name}, but no weight of matching shape")
        found[key] = Masked(weight.shape, weight.dtype, weight, mask)
    return source.with_tensors(found)
