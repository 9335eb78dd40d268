"""Objectives by name, and which one a run has: the config's, its model's, or next-token prediction.
Does not import torch: an objective is created when a run is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from overland.config.derived import starts_as_base
from overland.config.schema import JobConfig, Training
from overland.errors import ObjectiveError
from overland.run_folder import first_taken
from overland.words import did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from overland.objectives.objective import Objective

AUTO = "auto"
NEXT_TOKEN = "next_token"


def register_objective(name: str, make: Callable[..., Objective] | None = None) -> Any:
    """Makes `training.objective = NAME` use the objective that
    `make(**training.objective_options)` returns. Usable as a decorator:
    `@register_objective(NAME)`."""
    if make is None:
        return partial(register_objective, name)
    if name in _OBJECTIVES or name == AUTO:
        raise ObjectiveError(f"an objective named '{name}' is already registered")
    _OBJECTIVES[name] = make
    return make


def objective_name(training: Training, architecture: Any) -> str:
    """Returns the objective that the config names, or else the model's config (by default,
    next_token)."""
    if training.objective != AUTO:
        return training.objective
    return str(getattr(architecture, "objective", NEXT_TOKEN))


def objective_for(config: JobConfig, architecture: Any) -> Objective:
    training = config.training
    if config.preference.loss != "off":
        return _preference(config)
    name, options = objective_name(training, architecture), dict(training.objective_options)
    if name not in _OBJECTIVES:
        raise ObjectiveError(f"there is no objective '{name}'{did_you_mean(name, _OBJECTIVES)}")
    if name == NEXT_TOKEN:
        options["z_loss"] = training.z_loss
    elif training.z_loss:
        raise ObjectiveError(
            f"training.z_loss is part of {NEXT_TOKEN}, but the objective is {name}: remove it"
        )
    try:
        objective = _OBJECTIVES[name](**options)
    except (TypeError, ValueError) as error:
        raise ObjectiveError(f"the objective '{name}' cannot be created: {error}") from None
    if problem := _wrong(objective):
        raise ObjectiveError(f"the objective '{name}' {problem}")
    return objective


def _wrong(objective: object) -> str:
    """Returns what is wrong with the attributes of an objective, if anything."""
    from overland.objectives.objective import Objective

    if not isinstance(objective, Objective):
        return f"is a {type(objective).__name__}, but must extend Objective"
    if objective.counts not in ("tokens", "samples"):
        return f"counts {objective.counts!r}, but must count tokens or samples"
    rows = objective.rows_per_sample
    if not isinstance(rows, int) or rows < 1:
        return f"has rows_per_sample = {rows!r}, which must be a whole number of at least 1"
    for key in ("metrics", "passes"):
        names = getattr(objective, key)
        if isinstance(names, str) or len({*names}) < len(names):
            return f"has {key} = {names!r}, which must be a tuple of different names"
    if taken := first_taken(objective.metrics):
        return f"cannot log a metric as '{taken}', which is reserved; choose another name"
    if given := [one for one in objective.passes if one.endswith(("_B", "_BS"))]:
        return f"has a pass named {given[0]}, like a field of the data: name it {given[0]}_Bk"
    return ""


def give_objective(parts: Sequence[nn.Module], objective: Objective) -> None:
    """Sets the objective on the model, where its head uses it. A model without an `objective`
    attribute computes its loss itself."""
    from overland.models.inner import InnerLoss
    from overland.models.structure import Inputs
    from overland.objectives.objective import Objective

    computes = any(
        getattr(type(objective), one) is not getattr(Objective, one) for one in ("terms", "loss")
    )
    for part in parts:
        inner = {one.name for one in part.modules() if isinstance(one, InnerLoss)}
        if both := inner & {*objective.metrics}:
            raise ObjectiveError(
                f"the objective and the model both log {min(both)}: rename one of them"
            )
        if hasattr(part, "objective"):
            part.objective = objective  # type: ignore[assignment]
            if objective.gathers and not Inputs(part).takes_all:
                raise ObjectiveError(
                    f"{type(part).__name__}.forward() must take **fields and pass them to "
                    "objective.compare(), which needs more fields of the batch than the model"
                )
        elif computes or objective.metrics or objective.passes:
            raise ObjectiveError(
                f"{type(part).__name__} computes its loss itself (it has no attribute `objective`, "
                "see docs/extending.md), so training.objective and training.z_loss would have no "
                "effect: remove them"
            )


def _preference(config: JobConfig) -> Objective:
    from overland.objectives.preference import PreferenceLoss

    if config.training.objective != AUTO or config.training.z_loss:
        raise ObjectiveError(
            "preference.loss is itself the objective: remove training.objective and training.z_loss"
        )
    return PreferenceLoss(config.preference, starts_as_base(config))


def _next_token(**options: Any) -> Objective:
    from overland.objectives.objective import NextToken

    return NextToken(**options)


def _own(**options: Any) -> Objective:
    """Creates the objective of a model that computes its own loss, summed over samples."""
    from overland.objectives.objective import Objective

    return Objective(**options)


_OBJECTIVES: dict[str, Callable[..., Objective]] = {NEXT_TOKEN: _next_token, "per_sample": _own}
