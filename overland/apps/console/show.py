"""What the trainer calls to show a run; see `overland/plugins.py`."""

from __future__ import annotations

from collections.abc import Callable

from overland.apps.console.bar import Console
from overland.apps.console.closing import closing
from overland.apps.console.opening import opening
from overland.apps.console.readme import write_readme
from overland.apps.console.services import TensorBoard, WeightsAndBiases
from overland.apps.report.plot import LossPlot
from overland.training.callbacks import Callback
from overland.training.run import Run

__all__ = ["callbacks", "closing", "opening", "write_readme"]


def callbacks(run: Run) -> list[Callback]:
    """Returns what shows the run on this rank."""
    metrics, first = run.config.metrics, run.world.is_first
    wanted: list[tuple[bool, Callable[[Run], Callback]]] = [
        (run.screen.is_shown, Console),
        (first, LossPlot),
        (first and metrics.enable_tensorboard, TensorBoard),
        (first and metrics.enable_wandb, WeightsAndBiases),
    ]
    return [make(run) for is_wanted, make in wanted if is_wanted]
