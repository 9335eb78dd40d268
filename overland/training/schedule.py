"""The learning rate of a step: a pure function of the step, so there is nothing to save or
restore."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from overland.config.errors import show_value
from overland.config.schema import JobConfig
from overland.words import any_of


def learning_rate(step: int, config: JobConfig) -> float:
    """Returns the learning rate of update number `step`, counted from 0."""
    settings, peak = config.lr_scheduler, config.optimizer.lr
    total = settings.total_steps or config.training.steps
    lowest = settings.min_lr_factor
    if settings.min_lr is not None:
        lowest = settings.min_lr / peak if peak else 0.0

    warmup = settings.warmup(total)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if settings.decay_type == "constant":
        return peak
    decay = total - warmup if settings.decay_ratio is None else round(total * settings.decay_ratio)
    start = max(warmup, total - decay)
    if step < start:
        return peak
    progress = min(1.0, (step - start) / max(1, total - start))
    return peak * (lowest + (1 - lowest) * _remaining(progress, settings.decay_type))


def changed_rate(step: int, before: Mapping[str, Any], config: JobConfig) -> str:
    """Returns a note if the next update, number `step`, has another learning rate than with the
    config that the resumed checkpoint was saved with; empty if it has not."""
    if not before or not 0 < step < config.training.steps:
        return ""
    sections = ("training", "optimizer", "lr_scheduler")
    try:
        earlier = JobConfig.model_validate({name: before[name] for name in sections})
    except (KeyError, ValidationError):  # from another version
        return ""
    if math.isclose(learning_rate(step, earlier), learning_rate(step, config)):
        return ""
    totals = [one.lr_scheduler.total_steps or one.training.steps for one in (earlier, config)]
    has_other_length = totals[0] != totals[1]
    keys = [*(["training.steps"] if has_other_length else []), "optimizer.lr"]
    keys += [f"lr_scheduler.{name}" for name in type(config.lr_scheduler).model_fields]
    changes = []
    for key in keys:
        old, new = earlier.value(key), config.value(key)
        if old != new:
            changes.append(f"{key} ({show_value(old)} → {show_value(new)})")
    note = (
        f"the schedule has changed with {any_of(changes, 'and')}: the learning rate was "
        f"{learning_rate(step - 1, earlier):.2e} and is now {learning_rate(step, config):.2e}"
    )
    if has_other_length:
        note += f"; lr_scheduler.total_steps = {totals[0]} keeps the earlier one"
    return note


def _remaining(progress: float, decay_type: str) -> float:
    """Returns how much is left of the decay: 1 at its start, 0 at its end."""
    if decay_type == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if decay_type == "sqrt":
        return 1 - math.sqrt(progress)
    return 1 - progress
