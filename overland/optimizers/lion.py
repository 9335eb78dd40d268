"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"): the sign of an average.

Every element moves by the learning rate, whatever the size of its gradient, so learning rates are 3
to 10 times smaller than AdamW's, and weight decay is larger by the same factor. It keeps one
average per parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from overland.optimizers.rule import Elementwise, Like, Rates, StateKinds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from overland.optimizers.rule import State


@dataclass(frozen=True)
class Lion(Elementwise):
    beta1: float = 0.9
    """Weight of the average in the direction."""
    beta2: float = 0.99
    """Decay of the average."""
    bf16_moments: bool = False
    """Keep the average in bfloat16, stochastically rounded."""

    def state(self, name: str, shape: Sequence[int]) -> StateKinds:
        return {"exp_avg": Like("bfloat16" if self.bf16_moments else None)}

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, rates: Rates
    ) -> tuple[Tensor, State]:
        average = state["exp_avg"]
        direction = gradient.lerp(average, self.beta1).sign()
        parameter = parameter * (1 - rates.lr * rates.weight_decay) - rates.lr * direction
        return parameter, {"exp_avg": gradient.lerp(average, self.beta2)}
