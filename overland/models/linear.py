"""Base classes of linear layers that transforms change in place (8 bits, 4 bits, sparse, adapters),
and of those transforms. Weights keep their names.

A class of such layers says what tensor parallelism needs to split it, so that parallel code knows
none of them by name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overland.errors import ModelError
from overland.models.structure import Role, blocks_of
from overland.models.transform import Transform, matrices_of


class ChangedLinear(nn.Linear):
    """A linear layer that a transform has changed."""

    def multiply(self, x: Tensor, weight_OD: Tensor, first: int = 0) -> Tensor:
        """Returns the product without the bias. Under tensor parallelism, `x` and the weight are a
        rank's parts, and `first` is the index of x's first feature."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        out = self.multiply(x, self.weight)
        return out if self.bias is None else out + self.bias

    def roles(self, role: Role) -> dict[str, Role]:
        """Returns the roles of the matrices that the layer has in addition to its weight, given
        that of the weight. Raises a ModelError if the layer cannot be split."""
        return {}

    def become_part(self) -> None:
        """Called when tensor parallelism has split the layer."""


class AddedMatrix(nn.Linear):
    """A matrix that a transform has added to a layer."""

    part: Callable[[Tensor], Tensor] = staticmethod(lambda weight: weight)
    """Returns what this rank computes with; tensor parallelism replaces it."""

    def here(self) -> Tensor:
        return self.part(self.weight)


class LinearTransform(Transform):
    """Base class of transforms that change linear layers of the blocks."""

    def apply(self, model: nn.Module) -> None:
        layers = dict(linear_layers(model))
        changed = [name for name, module in layers.items() if self.change(name, module)]
        if not layers:
            raise ModelError(
                f"{self.key} changes the linear layers of a model's blocks, and "
                f"{type(model).__name__} has none (structure(), see docs/extending.md): remove it"
            )
        if not changed:
            raise ModelError(
                f"{self.key} matches no linear layer of this model's blocks, such as "
                f"{next(iter(layers))}"
            )

    @abstractmethod
    def change(self, name: str, module: nn.Linear) -> bool:
        """Changes a layer in place, if it is one of those that the transform changes; returns
        whether it is."""

    def left_out(self, model: nn.Module) -> list[str]:
        return [
            name
            for name, module, matrix in matrices_of(model)
            if self.expects(name) and not self.has_changed(module, matrix)
        ]

    def expects(self, name: str) -> bool:
        """Whether one would expect this matrix of a block to be changed."""
        return True

    @abstractmethod
    def has_changed(self, module: nn.Module, matrix: Tensor) -> bool:
        """Whether the transform has changed the module that owns this matrix."""


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yields the linear layers of the blocks by their full names."""
    for path, block in blocks_of(model).items():
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear):
                yield f"{path}.{name}", module


def here(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that is on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
