"""Detects bad steps (not finite, nothing to learn from, a loss spike), stops after too many, and
scales the loss in float16; loop.py reacts to a spike."""

from __future__ import annotations

import math
import statistics
from collections import deque

import torch

from overland.config.schema import Health
from overland.errors import TrainingError

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000


class BadSteps:
    """Counts steps that were skipped because the loss or a gradient was not finite, or because
    nothing in the batch counts towards the loss. The latter are harmless: a long prompt, which is
    not learned, may fill many batches. They neither end a run nor interrupt a series of bad steps.

    The flags stay on the device until `check`, so that no step waits for them.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._in_a_row = 0
        self._flags: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def note(self, step: int, not_finite: torch.Tensor, is_empty: torch.Tensor) -> None:
        self._flags.append((step, not_finite, is_empty))

    @property
    def is_due(self) -> bool:
        """Whether the limit could have been reached since the last check."""
        return len(self._flags) + self._in_a_row >= self.limit

    def check(self) -> tuple[list[int], list[int]]:
        """Reads the flags; returns the steps since the last check that were not finite, and those
        in which nothing counted."""
        if not self._flags:
            return [], []
        steps = [step for step, *_ in self._flags]
        flags = torch.stack([flag for _, *both in self._flags for flag in both]).tolist()
        skipped, empty = [], []
        for step, not_finite, is_empty in zip(steps, flags[::2], flags[1::2], strict=True):
            if is_empty:
                empty.append(step)
                continue
            self._in_a_row = self._in_a_row + 1 if not_finite else 0
            if not_finite:
                skipped.append(step)
            if self._in_a_row >= self.limit:
                raise TrainingError(
                    f"the loss or a gradient was not finite in {self.limit} steps in a row, up to "
                    f"step {step}; these steps were skipped. Resume from a checkpoint with a "
                    f"lower optimizer.lr, or raise health.max_bad_steps"
                )
        self._flags.clear()
        return skipped, empty


class SpikeGuard:
    """Detects a loss spike: a loss many standard deviations above the recent ones."""

    def __init__(self, settings: Health) -> None:
        self.threshold = settings.spike_threshold
        self._losses: deque[float] = deque(maxlen=settings.spike_window)
        self._enough = max(8, settings.spike_window // 4)

    def is_spike(self, loss: float) -> bool:
        """Judges a loss and, unless it is a spike, remembers it."""
        if not math.isfinite(loss):
            return False  # already skipped, and counted by BadSteps
        if len(self._losses) >= self._enough:
            mean, deviation = statistics.fmean(self._losses), statistics.pstdev(self._losses)
            # At least 0.1 % of the mean: on a plateau the deviation means nothing.
            if loss > mean + self.threshold * max(deviation, 1e-3 * abs(mean)):
                return True
        self._losses.append(loss)
        return False

    def to_json(self) -> list[float]:
        return list(self._losses)

    def restore(self, losses: list[float]) -> None:
        self._losses.clear()
        self._losses.extend(losses)


class LossScaler:
    """Dynamic loss scaling for float16, whose smallest gradients would otherwise vanish. The scale
    halves on overflow and doubles after `GROWTH_INTERVAL` good steps. It stays on the device: no
    step waits for the host to learn whether it overflowed.

    When disabled, the scale is 1 and never changes, so callers need not check.
    """

    def __init__(self, enabled: bool, device: torch.device) -> None:
        self.enabled = enabled
        self.scale = torch.full((), INITIAL_SCALE if enabled else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, overflowed: torch.Tensor) -> None:
        """Adapts the scale; `overflowed` is 1.0 if the step overflowed and was skipped, else
        0.0."""
        if self.enabled:
            torch._amp_update_scale_(
                self.scale, self.good_steps, overflowed, 2.0, 0.5, GROWTH_INTERVAL
            )

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"scaler.scale": self.scale, "scaler.good_steps": self.good_steps}
