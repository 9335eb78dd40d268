"""The learning-rate schedule fits into the run."""

from __future__ import annotations

from collections.abc import Iterator

from overland.config.errors import Kind, Problem
from overland.config.load import Loaded

WARMUP = "lr_scheduler.warmup_steps"


def check_warmup(loaded: Loaded) -> Iterator[Problem]:
    """Warm-up and decay within the steps of the schedule.

    A contradiction inside the file is an error. If a key has its default, or the command line
    shortens the run to try it (`training.steps=20`), a note is enough: it stops in its warm-up.
    """
    schedule = loaded.config.lr_scheduler
    spans = "lr_scheduler.total_steps" if schedule.total_steps else "training.steps"
    total = schedule.total_steps or loaded.config.training.steps
    warmup = schedule.warmup_steps
    if warmup > total:
        message = f"the warm-up is longer than the schedule ({spans} = {total})"
        if _together(loaded, WARMUP, spans) == "invalid":
            message += f"; expected at most {total}"
        kind = _together(loaded, WARMUP, spans)
        yield Problem(message, loaded.where(WARMUP), WARMUP, warmup, kind=kind)
    elif schedule.decay_ratio is not None:
        decay = round(schedule.decay_ratio * total)
        if warmup + decay > total:
            key = "lr_scheduler.decay_ratio"
            message = (
                f"{warmup} steps of warm-up and {decay} of decay are more than the {total} of "
                f"{spans}; expected at most {int((total - warmup) / total * 1000) / 1000:g}"
            )
            kind = _together(loaded, WARMUP, key)
            yield Problem(message, loaded.where(key), key, schedule.decay_ratio, kind=kind)


def check_lowest_rate(loaded: Loaded) -> Iterator[Problem]:
    lowest, peak = loaded.config.lr_scheduler.min_lr, loaded.config.optimizer.lr
    if lowest is not None and lowest > peak:
        key = "lr_scheduler.min_lr"
        message = f"expected at most the peak rate (optimizer.lr = {peak:g})"
        yield Problem(message, loaded.where(key), key, lowest)


def check_recompute(loaded: Loaded) -> Iterator[Problem]:
    option = loaded.config.activation_checkpoint.selective_ac_option
    if option != "op" and not (option.isdecimal() and int(option) > 0):
        key = "activation_checkpoint.selective_ac_option"
        message = 'expected "op" or a positive whole number in quotes, such as "2"'
        yield Problem(message, loaded.where(key), key, option)


def _together(loaded: Loaded, *keys: str) -> Kind:
    places = {loaded.where(key).rpartition(":")[0] for key in keys}
    written = all(loaded.is_set(key) for key in keys)
    return "invalid" if written and len(places) == 1 else "note"
