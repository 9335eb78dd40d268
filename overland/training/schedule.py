"""The learning rate of a step: a pure function, so there is nothing to save or restore."""

from __future__ import annotations

import math

from overland.config.schema import JobConfig


def learning_rate(step: int, config: JobConfig) -> float:
    """The rate for update number `step` (counted from 0)."""
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


def _remaining(progress: float, decay_type: str) -> float:
    """1 at the start of the decay, 0 at its end."""
    if decay_type == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    if decay_type == "sqrt":
        return 1 - math.sqrt(progress)
    return 1 - progress
