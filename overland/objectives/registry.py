"""Objectives by name. Imports no torch: an objective is made when a run is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from overland.config.schema import Training
from overland.models.errors import nearest
from overland.objectives.errors import ObjectiveError

if TYPE_CHECKING:
    from torch import nn

    from overland.objectives.objective import Objective

AUTO = "auto"
NEXT_TOKEN = "next_token"


def register_objective(name: str, make: Callable[..., Objective]) -> None:
    """Makes `training.objective = NAME` train on what `make(**training.objective_options)`
    returns."""
    if name in _OBJECTIVES or name == AUTO:
        raise ObjectiveError(f"an objective named '{name}' is already registered")
    _OBJECTIVES[name] = make


def objective_name(training: Training, architecture: Any) -> str:
    """What the config names, or else what the model's config does (next_token, by default)."""
    if training.objective != AUTO:
        return training.objective
    return str(getattr(architecture, "objective", NEXT_TOKEN))


def objective_for(training: Training, architecture: Any) -> Objective:
    name, options = objective_name(training, architecture), dict(training.objective_options)
    if name not in _OBJECTIVES:
        raise ObjectiveError(f"no objective is named '{name}'{nearest(name, _OBJECTIVES)}")
    if name == NEXT_TOKEN:
        options["z_loss"] = training.z_loss
    elif training.z_loss:
        raise ObjectiveError(
            f"training.z_loss is a part of {NEXT_TOKEN}, and the objective is {name}: leave it out"
        )
    try:
        return _OBJECTIVES[name](**options)
    except TypeError as error:
        raise ObjectiveError(f"the objective '{name}' cannot be made: {error}") from None


def give_objective(parts: Sequence[nn.Module], objective: Objective) -> None:
    """Puts the objective where the head finds it. A model without a place for it computes its loss
    by itself."""
    from overland.objectives.objective import Objective

    computes = any(
        getattr(type(objective), one) is not getattr(Objective, one) for one in ("terms", "loss")
    )
    for part in parts:
        if hasattr(part, "objective"):
            part.objective = objective  # type: ignore[assignment]
        elif computes or objective.metrics or objective.passes:
            raise ObjectiveError(
                f"{type(part).__name__} computes its loss by itself (it has no attribute "
                "`objective`, see docs/extending.md), so training.objective and training.z_loss "
                "would change nothing: leave them out"
            )


def _next_token(**options: Any) -> Objective:
    from overland.objectives.next_token import NextToken

    return NextToken(**options)


def _own(**options: Any) -> Objective:
    """A model that computes its loss by itself, summed over samples."""
    from overland.objectives.objective import Objective

    return Objective(**options)


_OBJECTIVES: dict[str, Callable[..., Objective]] = {NEXT_TOKEN: _next_token, "per_sample": _own}
