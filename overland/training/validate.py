"""The loss on held-out sets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from overland.data.loader import load_batch
from overland.data.prepare import Dataset
from overland.objectives.objective import count_of
from overland.parallel.comm import sum_over
from overland.parallel.context import share_of_rows
from overland.parallel.sharding import reshard
from overland.training.callbacks import Record
from overland.training.step import total_sums, with_known, with_passes
from overland.world.heartbeat import Phase

if TYPE_CHECKING:
    from overland.training.run import Run


def validate(run: Run) -> Record:
    """Returns the losses by set, and their mean as `validation_loss`, which "best" is judged by."""
    run.beat.enter(Phase.VALIDATING)
    losses = {f"validation_loss/{held.name}": loss_on(run, held) for held in run.validation_sets}
    mean = sum(losses.values()) / len(losses)
    run.progress.best_validation_loss = min(run.progress.best_validation_loss, mean)
    return {"step": run.progress.step, "validation_loss": mean, **losses}


@torch.no_grad()
def loss_on(run: Run, held_out: Dataset) -> float:
    mesh = run.mesh
    steps = held_out.rows.num_batches(at_most=run.config.validation.steps)
    sums = torch.zeros(run.model.num_sums, dtype=torch.float64, device=run.device)
    count = torch.zeros((), dtype=torch.float64, device=run.device)
    for number in range(steps):
        batch = load_batch(held_out.rows, number, mesh.dp_rank, mesh.dp_size)
        share = share_of_rows(with_known(run, batch.to(run.device)), mesh)
        count += count_of(run.objective, share)
        sums += run.model.loss(with_passes(run, share))
    reshard(run.model.parts)
    return float(total_sums(sums, mesh)[0] / sum_over(count, mesh.token_group))
