"""Dynamic loss scaling for float16, whose smallest gradients would otherwise vanish.

Everything stays on the device: no step waits for the host to learn whether it overflowed.
"""

from __future__ import annotations

import torch

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000


class LossScaler:
    """A scale that halves on overflow and doubles after `GROWTH_INTERVAL` good steps.

    Switched off, the scale is 1 and never changes, so callers need not ask.
    """

    def __init__(self, enabled: bool, device: torch.device) -> None:
        self.enabled = enabled
        self.scale = torch.full((), INITIAL_SCALE if enabled else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, overflowed: torch.Tensor) -> None:
        """`overflowed`: 1.0 if the step was thrown away, else 0.0."""
        if self.enabled:
            torch._amp_update_scale_(
                self.scale, self.good_steps, overflowed, 2.0, 0.5, GROWTH_INTERVAL
            )

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"scaler.scale": self.scale, "scaler.good_steps": self.good_steps}
