"""The optimizer exists, takes the options it is given, and its groups match parameters."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from overland.checks.model import nearest_parameters, parameter_names
from overland.config.errors import Problem
from overland.config.load import Loaded
from overland.config.schema import Optimizer
from overland.errors import ModelError, OptimizerError
from overland.optimizers.adamw import AdamW
from overland.optimizers.registry import optimizer_names, rules_of

ADAMW_KEYS = ("beta1", "beta2", "eps", "bf16_moments")


def check_optimizer(loaded: Loaded) -> Iterator[Problem]:
    settings = loaded.config.optimizer
    try:
        rules = rules_of(settings)
    except OptimizerError as error:
        known = settings.name in optimizer_names()
        key = "options" if known and settings.options else "name"
        key, value = f"optimizer.{key}", getattr(settings, key)
        yield Problem(str(error), loaded.where(key), key, value)
        return
    if any(isinstance(rule, AdamW) for rule in rules):
        return
    for name in ADAMW_KEYS:  # a run folder's config sets them all
        value = getattr(settings, name)
        if value != Optimizer.model_fields[name].default:
            key = f"optimizer.{name}"
            message = f"is an option of AdamW; {settings.name} takes its own in [optimizer.options]"
            yield Problem(message, loaded.where(key), key, value)


def check_moments(loaded: Loaded) -> Iterator[Problem]:
    key, dtype = "optimizer.bf16_moments", loaded.config.training.dtype
    if loaded.config.optimizer.bf16_moments and dtype != "float32":
        message = f"needs training.dtype = float32, not {dtype}"
        yield Problem(message, loaded.where(key), key, True)


def check_groups(loaded: Loaded) -> Iterator[Problem]:
    """Every pattern matches a parameter, and not only such that belong to an earlier group."""
    key, groups = "optimizer.groups", loaded.config.optimizer.groups
    if not groups:
        return
    try:
        names = parameter_names(loaded.config.model, all_names=False)
    except (ModelError, OSError):
        return
    left = set(names)
    for group in groups:
        matched = {name for name in names if fnmatchcase(name, group.pattern)}
        if not matched:
            near = nearest_parameters(group.pattern, names)
            message = f"'{group.pattern}' matches no parameter; the nearest names are {near}"
            yield Problem(message, loaded.where(key), key)
        elif not matched & left:
            message = (
                f"'{group.pattern}' matches only parameters of earlier groups, and the first match "
                "counts: put the narrower pattern first"
            )
            yield Problem(message, loaded.where(key), key)
        left -= matched
