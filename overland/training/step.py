"""One optimizer step: accumulate gradients over the global batch, clip, update.

The loss is a sum over tokens divided by the number of valid tokens in the whole global batch. So
neither accumulation, nor the split over devices, nor padding can change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from overland.data.loader import IGNORED, Batch
from overland.parallel.comm import sum_over
from overland.parallel.shard import sync_gradients
from overland.training.health import SpikeGuard
from overland.training.optimizer import gradient_norm, update
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
    training, scaler = run.config.training, run.scaler
    num_valid = sum_over((batch.labels_BS != IGNORED).sum())
    loss = torch.zeros((), dtype=torch.float64, device=run.device)

    micro_batches = list(batch.split(training.local_batch_size))
    for number, micro in enumerate(micro_batches, start=1):
        sync_gradients(run.model, last=number == len(micro_batches))
        micro_loss = forward(run, micro) / num_valid
        (micro_loss * scaler.scale).backward()
        loss += micro_loss.detach()

    sum_over(loss)
    norm = gradient_norm(run.optimizer) / scaler.scale
    not_finite = ~(torch.isfinite(loss) & torch.isfinite(norm))
    spiked = guard is not None and guard.is_spike(loss.item())
    rate = learning_rate(run.progress.step, run.config)
    update(run.optimizer, rate, norm, training.max_norm, scaler.scale, skip=not_finite | spiked)
    scaler.update(not_finite.float())
    return StepResult(loss, norm, not_finite, run.global_batch_size * training.seq_len, spiked)


def forward(run: Run, batch: Batch) -> torch.Tensor:
    """The summed loss of one micro-batch."""
    loss: torch.Tensor = run.model(
        batch.tokens_BS,
        positions_BS=batch.positions_BS,
        documents_BS=batch.documents_BS,
        labels_BS=batch.labels_BS,
    )
    return loss
