"""The loss plot of a run folder, drawn at every checkpoint and at the end, and other lines, as a
standalone SVG.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from overland.apps.report.charts import Chart, Line
from overland.apps.report.svg import chart_svg
from overland.apps.watch.history import History, Points
from overland.files import replace_file
from overland.training.callbacks import Callback

if TYPE_CHECKING:
    from overland.training.run import Run


class LossPlot(Callback):
    """Draws the loss from metrics.jsonl, at every checkpoint and at the end."""

    def on_save(self, run: Run, path: object) -> None:
        """Draws the plot, or reports why it could not: a failed plot never ends the run."""
        try:
            plot_losses(run.folder.metrics, run.folder.plot, run.config.job.description)
        except OSError as error:
            run.call("on_message", f"{run.folder.plot} was not drawn: {error.strerror}")

    def on_end(self, run: Run) -> None:
        self.on_save(run, None)


def plot_losses(metrics: Path, target: Path, title: str) -> None:
    """Draws the training loss, and held-out losses where there are any, from metrics.jsonl."""
    history = History(metrics)
    history.read_on()
    lines = {"training": history.losses}
    lines |= {f"held out: {name}": points for name, points in history.held_out.items()}
    replace_file(target, line_chart(lines, title), durable=False)


def line_chart(lines: Mapping[str, Points], title: str, across: str = "step") -> str:
    """Returns lines by their names as SVG text. Points that are not finite are left out."""
    chart = Chart("lines", title, across=across)
    for number, (name, points) in enumerate(lines.items()):
        steps, values = np.array(points, np.float64).reshape(-1, 2).T
        known = np.isfinite(values)
        if known.any():
            label = f"{name}, last {values[known][-1]:.4g}"
            line = Line(label, 0, number, "points", steps[known], values[known])
            chart.lines.append(line)
    return chart_svg(chart)
