"""Python's garbage collector runs when we say: a collection on one rank makes all others wait."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from overland.training.callbacks import Callback

if TYPE_CHECKING:
    from overland.training.run import Run


class GarbageCollection(Callback):
    def on_start(self, run: Run) -> None:
        gc.disable()
        gc.collect()
        gc.freeze()  # what lives now lives to the end: never look at it again

    def on_step(self, run: Run) -> None:
        if run.progress.step % run.config.training.gc_freq == 0:
            gc.collect(1)

    def on_end(self, run: Run) -> None:
        gc.unfreeze()
        gc.enable()
