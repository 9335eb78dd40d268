"""Optimizers by name: those that come with Overland, your own, and which rule updates which
parameter. A user's module (`job.custom_import`) adds its own with `register_optimizer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from overland.config.errors import show_value
from overland.config.schema import JobConfig, Optimizer
from overland.errors import OptimizerError
from overland.optimizers.elementwise import AdamW, Lion
from overland.optimizers.rule import (
    Elementwise,
    Rule,
    StateKinds,
    WholeMatrix,
    num_bytes,
    wrong_kind,
)
from overland.words import did_you_mean

_RULES: dict[str, type[Rule]] = {"AdamW": AdamW, "Adam": AdamW, "Lion": Lion}


def register_optimizer(name: str, rule: type[Rule] | None = None) -> Any:
    """Registers `optimizer.name = "<name>"`. `rule` is a frozen dataclass that extends
    `Elementwise` or `WholeMatrix`; its fields are the keys of `[optimizer.options]`. Usable as a
    decorator: `@register_optimizer(NAME)`."""
    if rule is None:
        return partial(register_optimizer, name)
    if name in _RULES:
        raise OptimizerError(f"an optimizer named '{name}' is already registered")
    if not (isinstance(rule, type) and issubclass(rule, Elementwise | WholeMatrix)):
        raise OptimizerError(f"'{name}' must be a class that extends Elementwise or WholeMatrix")
    if not is_dataclass(rule):
        raise OptimizerError(f"{rule.__name__} of '{name}' must be a dataclass")
    if missing := _missing_methods(rule):
        raise OptimizerError(
            f"{rule.__name__} of '{name}' has no {' and no '.join(missing)} (docs/extending.md)"
        )
    _RULES[name] = rule
    return rule


def _missing_methods(rule: type[Rule]) -> list[str]:
    """Returns the required methods that a rule does not define. AdamW needs none, since it has
    kernels."""
    if issubclass(rule, AdamW):
        return []
    base = Elementwise if issubclass(rule, Elementwise) else WholeMatrix
    wanted = ("update",) if base is Elementwise else ("whole", "after")
    return [f"{one}()" for one in wanted if getattr(rule, one) is getattr(base, one)]


def optimizer_names() -> list[str]:
    return sorted(_RULES)


def rule_class(name: str) -> type[Rule]:
    if name not in _RULES:
        raise OptimizerError(f"there is no optimizer '{name}'{did_you_mean(name, _RULES)}")
    return _RULES[name]


def rules_of(settings: Optimizer) -> list[Rule]:
    """Returns the rule that `[optimizer]` names, followed by the one for the parameters it does not
    take."""
    kind = rule_class(settings.name)
    if kind is AdamW:
        if settings.options:
            raise OptimizerError(
                f"{settings.name} takes its options from [optimizer] itself, not from "
                f"[optimizer.options]: {', '.join(settings.options)}"
            )
        return [AdamW.of(settings)]
    rules = [_with_options(kind, settings.name, settings.options)]
    if isinstance(rules[0], WholeMatrix):
        second = rules[0].others
        if not issubclass(rule_class(second), Elementwise):
            raise OptimizerError(
                f"{second} cannot take the parameters that {settings.name} leaves: it is not "
                "elementwise"
            )
        rules += rules_of(settings.model_copy(update={"name": second, "options": {}}))
    return rules


def rule_for(rules: Sequence[Rule], name: str, shape: Sequence[int]) -> Rule:
    """Returns the first rule that takes this parameter."""
    for rule in rules:
        if rule.takes(name, tuple(shape)):
            return rule
    raise OptimizerError(
        f"{type(rules[-1]).__name__} does not take {name}, and neither does any other optimizer; "
        "to leave a parameter unchanged, use model.freeze"
    )


def state_kinds(rules: Sequence[Rule], name: str, shape: Sequence[int]) -> StateKinds:
    """Returns the kinds of state that are kept of this parameter."""
    rule = rule_for(rules, name, shape)
    kinds = rule.state(name, tuple(shape))
    if not isinstance(kinds, Mapping):
        raise OptimizerError(f"{type(rule).__name__}.state() must return a dict of names and kinds")
    for state, kind in kinds.items():
        if problem := wrong_kind(kind):
            raise OptimizerError(f"{type(rule).__name__} cannot keep '{state}': {problem}")
        if not state.isidentifier() or state == "step":  # torch's name for the update count
            raise OptimizerError(
                f"{type(rule).__name__} cannot keep '{state}' in checkpoints: use a name of "
                "letters, digits and underscores other than 'step'"
            )
    return kinds


def state_bytes(
    config: JobConfig, shapes: Mapping[str, tuple[int, ...]], saved: bool = False
) -> float:
    """Returns the bytes of the state of these parameters, in memory or as saved."""
    rules = rules_of(config.optimizer)
    return sum(
        num_bytes(state_kinds(rules, name, shape), shape, config.training.dtype, saved)
        for name, shape in shapes.items()
    )


def same_state(one: str, other: str) -> bool:
    """Returns whether two optimizers, by name, keep the same state: Adam resumes what
    AdamW saved."""
    return one == other or (_RULES.get(one) is not None and _RULES.get(one) is _RULES.get(other))


def _with_options(kind: type[Rule], name: str, options: Mapping[str, Any]) -> Rule:
    assert is_dataclass(kind)
    valid = {field.name: field for field in fields(kind) if field.init}
    for key in options:
        if key not in valid:
            raise OptimizerError(f"{name} has no option '{key}'{did_you_mean(key, valid)}")
    types = get_type_hints(kind)
    for key, value in options.items():
        try:
            TypeAdapter(types[key]).validate_python(value, strict=True)
        except ValidationError as error:
            words = error.errors(include_url=False)[0]["msg"]
            raise OptimizerError(f"{name}'s option {key} = {show_value(value)}: {words}") from None
        if value != value:
            raise OptimizerError(f"{name}'s option {key} is not a number (nan)")
    for key, field in valid.items():
        if key not in options and field.default is field.default_factory is MISSING:
            raise OptimizerError(f"{name} needs optimizer.options.{key}, which has no default")
    try:
        return kind(**options)
    except ValueError as error:  # raised by the rule itself
        raise OptimizerError(f"{name}: {error}") from None
