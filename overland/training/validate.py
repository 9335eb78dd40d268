"""The loss on held-out sets."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from overland.data.loader import IGNORED, ShardBlocks, batches
from overland.data.prepare import Dataset
from overland.parallel.comm import sum_over
from overland.training.callbacks import Record
from overland.training.step import forward

if TYPE_CHECKING:
    from overland.training.run import Run


def validate(run: Run) -> Record:
    """Losses by set, and their mean as `validation_loss`, which "best" is judged by."""
    losses = {f"validation_loss/{held.name}": loss_on(run, held) for held in run.validation_sets}
    mean = sum(losses.values()) / len(losses)
    run.progress.best_validation_loss = min(run.progress.best_validation_loss, mean)
    return {"step": run.progress.step, "validation_loss": mean, **losses}


@torch.no_grad()
def loss_on(run: Run, held_out: Dataset) -> float:
    settings = run.config.validation
    rows = (settings.local_batch_size or run.config.training.local_batch_size) * run.mesh.dp_size
    steps = settings.steps
    if isinstance(held_out.blocks, ShardBlocks):  # a finite set is never read twice
        whole = max(1, held_out.blocks.num_blocks // rows)
        steps = whole if steps == -1 else min(steps, whole)
    total = torch.zeros(2, dtype=torch.float64, device=run.device)
    some = batches(held_out.blocks, 0, rows, run.mesh.dp_rank, run.mesh.dp_size)
    for batch in itertools.islice(some, steps):
        batch = batch.to(run.device)
        total[0] += forward(run, batch)
        total[1] += (batch.labels_BS != IGNORED).sum()
    sum_over(total)
    return float(total[0] / total[1])
