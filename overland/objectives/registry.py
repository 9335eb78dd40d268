"""Objectives by name. Imports no torch: an objective is made when a run is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from overland.config.schema import JobConfig, Training
from overland.errors import ObjectiveError
from overland.run_folder import first_taken
from overland.words import did_you_mean

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
    """Returns what the config names, or else what the model's config does (next_token,
    by default)."""
    if training.objective != AUTO:
        return training.objective
    return str(getattr(architecture, "objective", NEXT_TOKEN))


def objective_for(config: JobConfig, architecture: Any) -> Objective:
    training = config.training
    if config.preference.loss != "off":
        return _preference(config)
    name, options = objective_name(training, architecture), dict(training.objective_options)
    if name not in _OBJECTIVES:
        raise ObjectiveError(f"no objective is named '{name}'{did_you_mean(name, _OBJECTIVES)}")
    if name == NEXT_TOKEN:
        options["z_loss"] = training.z_loss
    elif training.z_loss:
        raise ObjectiveError(
            f"training.z_loss is a part of {NEXT_TOKEN}, and the objective is {name}: leave it out"
        )
    try:
        objective = _OBJECTIVES[name](**options)
    except (TypeError, ValueError) as error:
        raise ObjectiveError(f"the objective '{name}' cannot be made: {error}") from None
    if problem := _wrong(objective):
        raise ObjectiveError(f"the objective '{name}' {problem}")
    return objective


def _wrong(objective: object) -> str:
    """Returns what is wrong with what an objective says of itself, if anything."""
    from overland.objectives.objective import Objective

    if not isinstance(objective, Objective):
        return f"is made as a {type(objective).__name__}, and must extend Objective"
    if objective.counts not in ("tokens", "samples"):
        return f"counts {objective.counts!r}, and must count tokens or samples"
    rows = objective.rows_per_sample
    if not isinstance(rows, int) or rows < 1:
        return f"has rows_per_sample = {rows!r}, and must have a whole number of at least 1"
    for key in ("metrics", "passes"):
        names = getattr(objective, key)
        if isinstance(names, str) or len({*names}) < len(names):
            return f"has {key} = {names!r}, and must have a tuple of different names"
    if taken := first_taken(objective.metrics):
        return f"cannot log a metric as '{taken}', which means something else: name it otherwise"
    if given := [one for one in objective.passes if one.endswith(("_B", "_BS"))]:
        return f"has a pass named {given[0]}, as fields of the data are: name it {given[0]}_Bk"
    return ""


def give_objective(parts: Sequence[nn.Module], objective: Objective) -> None:
    """Puts the objective where the head finds it. A model without a place for it computes its loss
    by itself."""
    from overland.models.inner import InnerLoss
    from overland.objectives.objective import Objective

    computes = any(
        getattr(type(objective), one) is not getattr(Objective, one) for one in ("terms", "loss")
    )
    for part in parts:
        inner = {one.name for one in part.modules() if isinstance(one, InnerLoss)}
        if both := inner & {*objective.metrics}:
            raise ObjectiveError(f"the objective and the model both log {min(both)}: name one anew")
        if hasattr(part, "objective"):
            part.objective = objective  # type: ignore[assignment]
        elif computes or objective.metrics or objective.passes:
            raise ObjectiveError(
                f"{type(part).__name__} computes its loss by itself (it has no attribute "
                "`objective`, see docs/extending.md), so training.objective and training.z_loss "
                "would change nothing: leave them out"
            )


def _preference(config: JobConfig) -> Objective:
    from overland.objectives.preference import PreferenceLoss

    if config.training.objective != AUTO or config.training.z_loss:
        raise ObjectiveError(
            "preference.loss is an objective by itself: leave training.objective and "
            "training.z_loss out"
        )
    lora = config.lora
    is_base = bool(lora.rank) and lora.adapter is None and not lora.modules_to_save
    return PreferenceLoss(config.preference, starts_as_base=is_base)


def _next_token(**options: Any) -> Objective:
    from overland.objectives.objective import NextToken

    return NextToken(**options)


def _own(**options: Any) -> Objective:
    """Makes the objective of a model that computes its loss by itself, summed over samples."""
    from overland.objectives.objective import Objective

    return Objective(**options)


_OBJECTIVES: dict[str, Callable[..., Objective]] = {NEXT_TOKEN: _next_token, "per_sample": _own}
