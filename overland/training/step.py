"""One optimizer step: accumulate gradients over the global batch, clip, update.

What the loss is a mean of, and over what, is the objective's to say (see objectives/).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from overland.data.batch import Batch
from overland.objectives.objective import count_of
from overland.parallel.comm import from_first_rank, sum_over
from overland.parallel.context import share_of_rows
from overland.parallel.mesh import Mesh
from overland.parallel.sharding import reshard
from overland.training.gradient_norm import gradient_norm
from overland.training.health import SpikeGuard
from overland.training.schedule import learning_rate

if TYPE_CHECKING:
    from overland.training.run import Run


@dataclass(frozen=True)
class StepResult:
    """Tensors on the device; reading one waits for the step."""

    loss: torch.Tensor
    grad_norm: torch.Tensor
    not_finite: torch.Tensor
    is_empty: torch.Tensor
    """Whether nothing in the global batch counts. The loss, a mean over nothing, is then NaN."""
    num_units: int
    """Tokens, or samples that are arrays."""
    metrics: torch.Tensor
    """What the objective logs beside the loss, in the order of its names."""
    spiked: bool = False


def train_step(run: Run, batch: Batch, guard: SpikeGuard | None = None) -> StepResult:
    training, scaler, mesh = run.config.training, run.scaler, run.mesh
    share = share_of_rows(batch, mesh)
    count = sum_over(count_of(run.objective, share), mesh.token_group)
    is_empty = count == 0
    count = count.masked_fill(is_empty, 1)  # 0 / 1 and not 0 / 0: no gradient becomes NaN
    share = with_passes(run, share)
    run.inner.begin_step(scaler.scale / run.global_batch_size)
    sums = run.model.loss_and_gradients(share, scaler.scale / count)
    sums = (total_sums(sums, mesh) / scaler.scale).masked_fill(is_empty, torch.nan)
    loss = sums[0]

    norm = gradient_norm(run.optimizer, run.model, mesh).to(run.device) / scaler.scale
    not_finite = ~(torch.isfinite(loss) & torch.isfinite(norm)) & ~is_empty
    spiked = guard is not None and from_first_rank(guard.is_spike(loss.item()))
    rate = learning_rate(run.progress.step, run.config)
    run.store.wait_on_device()  # a checkpoint may still be copying what is about to change
    skip = not_finite | is_empty | spiked
    run.optimizer.update(rate, norm, training.max_norm, scaler.scale, skip)
    run.inner.after_step(skip)
    scaler.update(not_finite.float())
    num_units = run.global_batch_size * run.measure.per_row
    return StepResult(loss, norm, not_finite, is_empty, num_units, sums[1:], spiked)


def with_passes(run: Run, share: Batch) -> Batch:
    """With what the objective's passes without gradient find, as fields; away from the last stage
    of a pipeline, where they are not needed, without."""
    for field in run.objective.passes:
        with (
            torch.no_grad(),
            run.objective.during(field, run.model.parts),
            run.objective.finding(field) as found,
        ):
            run.model.look(share)
        reshard(run.model.parts)
        if found:
            share = share.replace(**{field: torch.cat(found)})
    return share


def total_sums(sums: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Summed over the ranks that hold different tokens, and known on every stage."""
    return sum_over(sum_over(sums, mesh.token_group), mesh.axis("pp").get_group())
