"""How many steps the epochs of a config come to.

The batches in the data are counted before training starts. If windows of text are packed, the
number of rows depends on their tokens, so all of the text is tokenized once. The shards are kept,
and so are the counts, in the run folder, where a resumed run reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from overland.config.schema import JobConfig, Training
from overland.data.blocks import BlockStream
from overland.data.corpora import Preparer
from overland.data.prepare import Dataset
from overland.errors import DataError
from overland.words import number_of

ROUND_SECONDS = 10.0  # between messages to the waiting ranks, so that no collective times out


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
