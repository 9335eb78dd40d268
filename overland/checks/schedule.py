"""The learning-rate schedule fits into the run."""

from __future__ import annotations

from collections.abc import Iterator

from overland.config.errors import Problem
from overland.config.load import Loaded

WARMUP = "lr_scheduler.warmup_steps"


def check_warmup(loaded: Loaded) -> Iterator[Problem]:
    """Warm-up and decay within the steps of the schedule. Only notes: a run cut short to try it
    (`training.steps=20`) ends in its warm-up, and that is what was asked for."""
    schedule = loaded.config.lr_scheduler
    spans = "lr_scheduler.total_steps" if schedule.total_steps else "training.steps"
    total = schedule.total_steps or loaded.config.training.steps
    warmup, decay = schedule.warmup_steps, round((schedule.decay_ratio or 0) * total)
    if warmup > total:
        message = f"the warm-up is longer than the schedule ({spans} = {total})"
        yield Problem(message, loaded.where(WARMUP), WARMUP, warmup, kind="note")
    elif warmup + decay > total:
        key = "lr_scheduler.decay_ratio"
        message = f"{warmup} steps of warm-up and {decay} of decay are more than {spans} = {total}"
        yield Problem(message, loaded.where(key), key, schedule.decay_ratio, kind="note")


def check_lowest_rate(loaded: Loaded) -> Iterator[Problem]:
    lowest, peak = loaded.config.lr_scheduler.min_lr, loaded.config.optimizer.lr
    if lowest is not None and lowest > peak:
        key = "lr_scheduler.min_lr"
        message = f"expected at most the peak rate (optimizer.lr = {peak:g})"
        yield Problem(message, loaded.where(key), key, lowest)
