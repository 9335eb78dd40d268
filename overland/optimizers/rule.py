"""Update rules: what an optimizer states, free of ranks, devices and number formats.

Tensors are float32, or wider where parameters are. What a rule returns takes the place of what was
there; a step that must be skipped is skipped by the framework, on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from overland.optimizers.state import Kinds

if TYPE_CHECKING:
    from torch import Tensor, nn

    from overland.optimizers.shard import Shard, Step

    State = Mapping[str, Tensor]
    Updater = Callable[[Sequence[Shard], Step], None]


@dataclass(frozen=True)
class Rates:
    """The rates of a parameter's group in this step."""

    lr: float
    weight_decay: float
    num_updates: Tensor
    """How many updates there have been, including this one: a float32 scalar on the device."""


class Rule:
    """What both kinds have in common."""

    def takes(self, name: str, shape: Sequence[int]) -> bool:
        """Whether this rule updates the parameter of this name and (whole) shape."""
        return True

    def state(self, name: str, shape: Sequence[int]) -> Kinds:
        """What is kept of such a parameter, by name."""
        return {}

    def updater(self, parameters: Mapping[str, nn.Parameter]) -> Updater:
        """Returns the function that updates these parameters, which are this rank's."""
        raise NotImplementedError


class Elementwise(Rule):
    """Every number moves by itself, so a shard, or a piece of one, is as good as the whole."""

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, rates: Rates
    ) -> tuple[Tensor, State]:
        """Returns the new parameter and its new state. The tensors may have any shape."""
        raise NotImplementedError

    def updater(self, parameters: Mapping[str, nn.Parameter]) -> Updater:
        from overland.optimizers.elementwise import update_in_pieces

        return partial(update_in_pieces, self)


class WholeMatrix(Rule):
    """Matrices are updated by something that takes all of them to know, such as an orthogonal
    factor. `before` and `after` run on shards; between them, `whole` runs once per matrix, on the
    rank that owns it."""

    others = "AdamW"
    """The optimizer of the parameters that this one does not take, with its own keys and options
    as set in [optimizer]."""

    def takes(self, name: str, shape: Sequence[int]) -> bool:
        """Matrices inside of blocks: neither embeddings nor the head, which are tables of rows."""
        return len(shape) == 2 and not any(word in name for word in ("embed", "lm_head"))

    def before(self, gradient: Tensor, state: State, rates: Rates) -> tuple[Tensor, State]:
        """Returns what is to be made whole, and the new state. It travels in the type it has."""
        return gradient, state

    def whole(self, matrix: Tensor) -> Tensor:
        """Returns the direction, in the shape of the matrix. It travels back in the same type."""
        raise NotImplementedError

    def after(
        self, parameter: Tensor, direction: Tensor, state: State, rates: Rates
    ) -> tuple[Tensor, State]:
        """Returns the new parameter and its new state, or the state that it was given."""
        raise NotImplementedError

    def updater(self, parameters: Mapping[str, nn.Parameter]) -> Updater:
        from overland.optimizers.matrices import Matrices

        return Matrices(self, parameters).update
