"""Validation: when each held-out set is due, how many of its sequences are read, their mean loss,
and which sets decide the best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

import torch

from overland.config.schema import Validation, ValidationSet
from overland.data.batch import load_batch
from overland.data.prepare import Dataset
from overland.data.sources.file_marks import digest_of
from overland.objectives.objective import NextToken, count_of
from overland.parallel.comm import sum_over, total_sums
from overland.parallel.context import share_of_rows
from overland.parallel.sharding import reshard
from overland.training.callbacks import Record
from overland.training.run import Run
from overland.training.step import with_known, with_passes
from overland.words import any_of
from overland.world.heartbeat import Phase

SEQUENCES = 128  # of a set, unless the config says how many
LARGEST_LOSS = 690.0  # e to this power is 1e299, near the end of float64


def sets_due(run: Run) -> list[Dataset]:
    """Returns the sets to validate on after this step; all of them after the last step."""
    step, settings = run.progress.step, run.config.validation
    is_last = step == run.config.training.steps
    return [
        held for held in run.validation_sets if is_last or step % cadence(settings, held.name) == 0
    ]


def cadence(settings: Validation, name: str) -> int:
    """Returns the number of steps between two validations on a set."""
    return settings.sets.get(name, ValidationSet()).freq or settings.freq


def num_sequences(run: Run, name: str) -> int:
    """Returns how many sequences of a set are read; -1: all. Batches are counted in the size that
    the run began with, so that another batch size does not change what is measured."""
    settings = run.config.validation
    for one in (settings.sets.get(name, ValidationSet()), settings):
        if one.sequences is not None:
            return one.sequences
        if one.steps is not None:
            first = run.dataset.plan.segments[0].global_batch_size
            return one.steps * first if one.steps > 0 else -1
    return SEQUENCES


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
        _compare_with_the_best(run, mean)
        record["validation_loss"] = mean
    for name, loss in losses.items():
        record |= {f"validation_loss/{name}": loss, f"validation/{name}/loss": loss}
        if isinstance(run.objective, NextToken):
            record[f"validation/{name}/perplexity"] = math.exp(min(loss, LARGEST_LOSS))
    return record


def _compare_with_the_best(run: Run, loss: float) -> None:
    """Notes the lowest loss so far. Losses on other sets than these do not count."""
    progress, mark = run.progress, mark_of_sets(run)
    if progress.validated_on not in ("", mark):
        progress.best_validation_loss = math.inf
        run.say(
            "note: validation_loss is now measured on other data or sequences than before, so the "
            "best checkpoint is chosen again; the best one so far is kept too"
        )
    progress.validated_on = mark
    progress.best_validation_loss = min(progress.best_validation_loss, loss)


def mark_of_sets(run: Run) -> str:
    """Returns a fingerprint of the sequences that `validation_loss` is measured on."""
    judged = judges(run)
    marks = []
    for held in run.validation_sets:
        if held.name in judged:
            whole = replace(held.plan.segments[0], global_batch_size=0)
            plan = replace(held.plan, segments=(whole,)).to_json()
            marks.append([held.name, plan, num_sequences(run, held.name)])
    return digest_of(sorted(marks, key=itemgetter(0)))[:16]  # the order does not matter


def about_sets(run: Run) -> list[str]:
    """Returns what is measured, for people: the sequences of each set, and the mean."""
    settings, judged = run.config.validation, judges(run)
    names = [held.name for held in run.validation_sets]
    alike: dict[int, list[str]] = {}
    for name in names:
        alike.setdefault(num_sequences(run, name), []).append(name)
    why, own = "validation.sequences", [one.steps for one in settings.sets.values()]
    if any((steps or 0) > 0 for steps in (settings.steps, *own)):
        size = run.dataset.plan.segments[0].global_batch_size
        why = f"validation.steps counts batches of {size:,}, as the run began; {why} sets it"
    lines = [
        f"validation reads {f'up to {count:,}' if count > 0 else 'all'} sequences of "
        f"{any_of(some, 'and')} ({why})"
        for count, some in alike.items()
    ]
    if len(names) > 1:
        mean = any_of([name for name in names if name in judged], "and")
        lines.append(f"validation_loss is the mean of {mean}")
    return lines


@torch.no_grad()
def loss_on(run: Run, held_out: Dataset) -> float:
    """Returns the mean loss over the sequences of a set. The last batch may have fewer; rows that
    only fill it count nothing, so neither the batch size nor the number of ranks matters."""
    mesh, rows = run.mesh, held_out.rows
    size = held_out.plan.segments[0].global_batch_size
    wanted = num_sequences(run, held_out.name)
    total = rows.rows_left(at_most=wanted)
    if total is None:  # random tokens never end
        total = wanted if wanted > 0 else SEQUENCES
    sums = torch.zeros(run.model.num_sums, dtype=torch.float64, device=run.device)
    count = torch.zeros((), dtype=torch.float64, device=run.device)
    for number in range(-(-total // size)):
        batch = load_batch(rows, number, mesh.dp_rank, mesh.dp_size)
        left = total - number * size
        if left < size:  # on every rank, because all shares of a batch must have the same fields
            batch = batch.padded_from(left - mesh.dp_rank * len(batch))
        share = share_of_rows(with_known(run, batch.to(run.device)), mesh)
        count += count_of(run.objective, share)
        # Rows that are compared with each other come in larger batches, with as many per pass as in
        # training.
        per_pass = run.model.rows_per_pass if run.objective.gathers else len(share)
        for micro in with_passes(run, share).split(per_pass):
            sums += run.model.loss(micro)
    reshard(run.model.parts)
    return float(total_sums(sums, mesh)[0] / sum_over(count, mesh.token_group))
