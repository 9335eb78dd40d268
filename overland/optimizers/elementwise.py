"""The elementwise optimizers that come with Overland, AdamW (and Adam) and Lion: their options,
their state, and Lion's formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overland.config.schema import Optimizer
from overland.optimizers.rule import Elementwise, Like, Rates, StateKinds

if TYPE_CHECKING:
    from torch import Tensor

    from overland.optimizers.rule import State


@dataclass(frozen=True)
class AdamW(Elementwise):
    """AdamW (Loshchilov & Hutter 2019), and Adam, whose decay enters the gradient; with kernels.

    The kernels take all parameters of a group at once. They divide the gradients and skip a step on
    the device themselves, so there is no extra pass over the gradients. They are called on the
    shards: going through DTensor costs a second in the first call and milliseconds in later ones.
    Split master weights and bfloat16 moments have kernels of our own, which do the same arithmetic
    (see adamw.py).
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    bf16_moments: bool = False
    decoupled: bool = True

    @classmethod
    def of(cls, settings: Optimizer) -> AdamW:
        return cls(
            settings.beta1,
            settings.beta2,
            settings.eps,
            settings.bf16_moments,
            decoupled=settings.name != "Adam",
        )

    def state(self, name: str, shape: Sequence[int]) -> StateKinds:
        moment = Like("bfloat16" if self.bf16_moments else None)
        return {"exp_avg": moment, "exp_avg_sq": moment}


@dataclass(frozen=True)
class Lion(Elementwise):
    """The sign of an average (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms").

    Every element moves by the learning rate, whatever the size of its gradient, so learning rates
    are 3 to 10 times smaller than AdamW's, and weight decay is larger by the same factor. It keeps
    one average per parameter.
    """

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
