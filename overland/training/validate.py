"""The loss on held-out sets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from overland.config.schema import Validation, ValidationSet
from overland.data.loader import load_batch
from overland.data.prepare import Dataset
from overland.objectives.objective import NextToken, count_of
from overland.parallel.comm import sum_over
from overland.parallel.context import share_of_rows
from overland.parallel.sharding import reshard
from overland.training.callbacks import Record
from overland.training.step import total_sums, with_known, with_passes
from overland.world.heartbeat import Phase

LARGEST_LOSS = 690.0  # e to this power is 1e299, near the end of float64

if TYPE_CHECKING:
    from overland.training.run import Run


def sets_due(run: Run) -> list[Dataset]:
    """Returns the sets to validate on after this step; all of them after the last step."""
    step, settings = run.progress.step, run.config.validation
    is_last = step == run.config.training.steps
    return [
        held
        for held in run.validation_sets
        if is_last or step % cadence(settings, held.name)[0] == 0
    ]


def cadence(settings: Validation, name: str) -> tuple[int, int]:
    """Returns the number of steps between two validations on a set, and the batches of each."""
    own = settings.sets.get(name, ValidationSet())
    return own.freq or settings.freq, settings.steps if own.steps is None else own.steps


def judges(run: Run) -> set[str]:
    """Returns the sets that decide which checkpoint is best: those without their own cadence, if
    any."""
    names, sets = [held.name for held in run.validation_sets], run.config.validation.sets
    usual = {name for name in names if name not in sets or sets[name].freq is None}
    return usual or {*names}


def validate(run: Run, due: Sequence[Dataset]) -> Record:
    """Returns loss and perplexity by set and, if these include all sets that decide which
    checkpoint is best, the mean loss of those as `validation_loss`."""
    run.beat.enter(Phase.VALIDATING)
    losses = {held.name: loss_on(run, held) for held in due}
    record: Record = {"step": run.progress.step}
    judged = judges(run)
    if judged <= losses.keys():
        mean = sum(losses[name] for name in losses if name in judged) / len(judged)
        run.progress.best_validation_loss = min(run.progress.best_validation_loss, mean)
        record["validation_loss"] = mean
    for name, loss in losses.items():
        record |= {f"validation_loss/{name}": loss, f"validation/{name}/loss": loss}
        if isinstance(run.objective, NextToken):
            record[f"validation/{name}/perplexity"] = math.exp(min(loss, LARGEST_LOSS))
    return record


@torch.no_grad()
def loss_on(run: Run, held_out: Dataset) -> float:
    mesh = run.mesh
    _, num_batches = cadence(run.config.validation, held_out.name)
    steps = held_out.rows.num_batches(at_most=num_batches)
    sums = torch.zeros(run.model.num_sums, dtype=torch.float64, device=run.device)
    count = torch.zeros((), dtype=torch.float64, device=run.device)
    for number in range(steps):
        batch = load_batch(held_out.rows, number, mesh.dp_rank, mesh.dp_size)
        share = share_of_rows(with_known(run, batch.to(run.device)), mesh)
        count += count_of(run.objective, share)
        sums += run.model.loss(with_passes(run, share))
    reshard(run.model.parts)
    return float(total_sums(sums, mesh)[0] / sum_over(count, mesh.token_group))
