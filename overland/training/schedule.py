"""The learning rate of a step, and how many steps there are.

The rate is a pure function of the step, so there is nothing to save or restore. Epochs are turned
into steps by counting the batches in the data before training starts. If windows of text are
packed, the number of rows depends on their tokens, so all of the text is tokenized once. The
shards are kept, and so are the counts, in the run folder, where a resumed run reads them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from overland.config.errors import show_value
from overland.config.schema import JobConfig, Training
from overland.data import registry
from overland.data.blocks import BlockStream
from overland.data.corpora import Preparer
from overland.data.corpus_folder import is_corpus
from overland.data.prepare import Dataset, training_data
from overland.data.registry import sources_of
from overland.data.sources.array_list import is_array_list
from overland.errors import DataError
from overland.words import any_of, number_of

ROUND_SECONDS = 10.0  # between messages to the waiting ranks, so that no collective times out


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
        section, _, name = key.partition(".")
        old, new = (getattr(getattr(one, section), name) for one in (earlier, config))
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


def with_steps(config: JobConfig, dataset: Dataset, place: Preparer) -> JobConfig:
    """Returns the config with `training.steps` filled in if it asks for epochs."""
    training = config.training
    if training.epochs is None:
        return config
    while not place.once(lambda: count_windows(dataset, training.epochs or 0, place.report)):
        pass
    steps = place.once(lambda: num_steps(dataset, training))
    name = source_name(dataset)
    place.report(f"training.epochs = {training.epochs:g} of {name} is {number_of(steps, 'step')}")
    schedule = config.lr_scheduler
    total = schedule.total_steps or steps
    if (warmup := schedule.warmup(total)) > min(steps, total):
        place.report(
            f"the run ends during its warm-up of {warmup:,} steps, below the peak learning rate: "
            "set lr_scheduler.warmup_ratio, such as 0.03, instead of warmup_steps"
        )
    settled = training.model_copy(update={"steps": steps})
    return config.model_copy(update={"training": settled})


def known_steps(config: JobConfig, global_batch_size: int) -> int | None:
    """Returns the number of steps, if it can be known without tokenizing anything."""
    if config.training.epochs is None:
        return config.training.steps
    ((name, wanted),) = ((name, one) for name, one in sources_of(config).items() if one.weight)
    folder = registry.find_folder(name, wanted, config.data)
    is_made = registry.is_made(name, wanted)
    is_list = folder is not None and folder.is_file() and is_array_list(folder)
    is_built = folder is not None and is_corpus(folder) and not config.data.holdout
    if not (is_made or is_list or is_built):
        return None
    dataset = training_data(config, global_batch_size, None, Preparer())
    try:
        return num_steps(dataset, config.training)
    finally:
        dataset.close()


def num_steps(dataset: Dataset, training: Training) -> int:
    assert training.epochs is not None
    rows = dataset.rows
    steps = rows.num_batches(training.epochs, drop=training.last_batch == "drop")
    if steps < 1:
        size = rows.plan.segments[-1].global_batch_size
        raise DataError(
            f"training.epochs = {training.epochs:g} of {source_name(dataset)} does not fill one "
            f'batch of {size:,} rows: set training.last_batch = "pad", or lower '
            "training.global_batch_size"
        )
    return steps


def source_name(dataset: Dataset) -> str:
    """Returns the name of the one source that is read."""
    return next(name for name, weight in dataset.plan.segments[-1].weights.items() if weight)


def count_windows(dataset: Dataset, epochs: float, report: Callable[[str], None]) -> bool:
    """Counts the rows of windows for up to `ROUND_SECONDS`; returns whether all were counted."""
    started = time.monotonic()
    for lane in dataset.rows.lanes(dataset.plan.segments[-1].first_batch).lanes:
        if not isinstance(lane, BlockStream):
            continue
        total = lane.windows_before(-int(-epochs // 1))
        for window in range(lane.num_counted, total):
            lane.num_blocks(window + 1)
            if time.monotonic() - started > ROUND_SECONDS:
                report(f"counting rows for training.epochs: {window + 1:,} of {total:,} windows")
                return False
    return True
