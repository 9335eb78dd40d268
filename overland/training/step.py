"""One optimizer step: accumulate gradients over the global batch, clip, update.

The loss is a sum over tokens divided by the number of valid tokens in the whole global batch. So
neither accumulation, nor the split over devices, nor padding can change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from overland.data.batch import IGNORED, Batch
from overland.parallel.comm import from_first_rank, sum_over
from overland.parallel.context import share_of_rows
from overland.parallel.mesh import Mesh
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
    num_tokens: int
    spiked: bool = False


def train_step(run: Run, batch: Batch, guard: SpikeGuard | None = None) -> StepResult:
    training, scaler, mesh = run.config.training, run.scaler, run.mesh
    share = share_of_rows(batch, mesh)
    num_valid = sum_over((share["labels_BS"] != IGNORED).sum(), mesh.token_group)
    loss = run.model.loss_and_gradients(share, scaler.scale / num_valid)
    loss = total_loss(loss, mesh) / scaler.scale

    norm = gradient_norm(run.optimizer, run.model, mesh).to(run.device) / scaler.scale
    not_finite = ~(torch.isfinite(loss) & torch.isfinite(norm))
    spiked = guard is not None and from_first_rank(guard.is_spike(loss.item()))
    rate = learning_rate(run.progress.step, run.config)
    run.store.wait_on_device()  # a checkpoint may still be copying what is about to change
    run.optimizer.update(rate, norm, training.max_norm, scaler.scale, skip=not_finite | spiked)
    scaler.update(not_finite.float())
    return StepResult(loss, norm, not_finite, run.global_batch_size * training.seq_len, spiked)


def total_loss(loss: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Summed over the ranks that hold different tokens, and known on every stage."""
    return sum_over(sum_over(loss, mesh.token_group), mesh.axis("pp").get_group())
