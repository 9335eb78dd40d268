"""The learning-rate schedule fits into the run."""

from __future__ import annotations

from collections.abc import Iterator

from overland.config.errors import Problem
from overland.config.load import Loaded
from overland.config.schema import IN_PLACE_OF
from overland.data.registry import is_random, sources_of
from overland.words import any_of

WARMUP = "lr_scheduler.warmup_steps"
EPOCHS = "training.epochs"


def check_units(loaded: Loaded) -> Iterator[Problem]:
    """What can be said in two units is said in one."""
    for key, other in IN_PLACE_OF.items():
        section, name = key.split(".")
        value = getattr(getattr(loaded.config, section), name)
        if value is not None and loaded.is_set(other):
            message = f"{other} is set too ({loaded.where(other)}): remove one of them"
            yield Problem(message, loaded.where(key), key, value)


def check_epochs(loaded: Loaded) -> Iterator[Problem]:
    """Epochs are those of a single source that ends."""
    config = loaded.config
    epochs, sources = config.training.epochs, sources_of(config)
    if epochs is None:
        return
    names = [name for name, source in sources.items() if source.weight]
    if len(names) > 1:
        message = f"{any_of(names, 'and')} have epochs of their own: set training.steps"
    elif config.data.mixture == "rows":
        message = 'with data.mixture = "rows" an epoch has no end: set data.mixture = "tokens"'
    elif any(is_random(name, sources[name]) for name in names):
        message = "random tokens have no end, and so no epochs: set training.steps"
    else:
        return
    yield Problem(message, loaded.where(EPOCHS), EPOCHS, epochs)


def check_warmup(loaded: Loaded) -> Iterator[Problem]:
    """Warm-up and decay within the steps of the schedule. Only notes: a run cut short to try it
    (`training.steps=20`) ends in its warm-up, and that is what was asked for."""
    schedule, training = loaded.config.lr_scheduler, loaded.config.training
    if training.epochs is not None and not schedule.total_steps:
        return  # so many steps are known when the data is counted
    spans = "lr_scheduler.total_steps" if schedule.total_steps else "training.steps"
    total = schedule.total_steps or training.steps
    warmup, decay = schedule.warmup(total), round((schedule.decay_ratio or 0) * total)
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
