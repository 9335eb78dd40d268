"""Collectives may take long until the first step is done (compilation, connections), not later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overland.parallel.comm import set_timeout
from overland.training.callbacks import Callback

if TYPE_CHECKING:
    from overland.training.run import Run


class Timeouts(Callback):
    def __init__(self, run: Run) -> None:
        self.is_set = False

    def on_step(self, run: Run) -> None:
        if not self.is_set:
            set_timeout(run.mesh, run.config.comm.train_timeout_seconds)
            self.is_set = True
