"""Decides which charts a report has, which lines each of them has (means, lost steps, several
runs), and how many points. `page.js` draws them in a browser, `svg.py` in files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from overland.apps.report.lines import (
    MetricColumns,
    Numbers,
    bin_sizes,
    means,
    rounded,
    spacing_of,
    thinned,
)
from overland.apps.report.sessions import with_borders
from overland.run_folder import METRIC_NAMES, VALIDATION, VALIDATION_LOSS

if TYPE_CHECKING:
    from overland.apps.report.summary import RunReport

MOST_POINTS = 90_000  # per page: about 1.5 MB
MOST_OF_A_LINE, LEAST_OF_A_LINE = 12_000, 200
MOST_ODD = 200  # marks of non-finite values, per line
MOST_LOST = 200  # sessions that lost steps
MANY = 2000  # points of a line
SMOOTH = ("lr", "memory_gib", "skipped_documents")
LOST = -1  # has its own color
MOST_OTHERS = 12  # charts of metrics that not every run has


@dataclass
class Line:
    """One line of a chart. `color` is an index into the palette; `kind` is how it is drawn."""

    name: str
    run: int
    color: int
    kind: str
    """raw, mean, trend, curve, points or lost."""
    steps: Numbers
    values: Numbers
    odd: list[tuple[int, str]] = field(default_factory=list)
    """Steps with a non-finite value."""
    shown: bool = True
    dash: int = 0
    """Dash pattern, to distinguish lines of the same color."""
    session: int | None = None
    """The session whose steps were lost."""


@dataclass
class Chart:
    id: str
    title: str
    unit: str = ""
    note: str = ""
    lines: list[Line] = field(default_factory=list)
    form: str = "number"
    """How its values are formatted: number, share or count."""
    across: str = "step"
    """What its x axis counts."""

    def to_json(self, most: int, differences: bool) -> dict[str, Any]:
        return {
            "id": self.id,
            "title": self.title,
            "unit": self.unit,
            "form": self.form,
            "lines": [
                {
                    **vars(line),
                    "odd": line.odd[:: -(-len(line.odd) // MOST_ODD) or 1],
                    **_points(line, most, differences),
                }
                for line in self.lines
            ],
        }


def _points(line: Line, most: int, differences: bool) -> dict[str, list[float]]:
    steps, values = thinned(line.steps, line.values, most)
    # Differences between steps take half the space; six digits are more than a screen can show.
    steps = np.diff(steps, prepend=0.0) if differences else steps
    return {
        "steps": [_short(step) for step in steps.tolist()],
        "values": [float(f"{value:.6g}") for value in values.tolist()],
    }


def _short(number: float) -> float:
    return int(number) if number.is_integer() else round(number, 2)


def charts_to_json(charts: Sequence[Chart], differences: bool = True) -> list[dict[str, Any]]:
    """Returns all charts, thinned to the number of points that a page may have, with steps or, as
    in a page, the differences between them."""
    num_lines = sum(len(chart.lines) for chart in charts) or 1
    most = min(MOST_OF_A_LINE, max(LEAST_OF_A_LINE, MOST_POINTS // num_lines))
    return [chart.to_json(most, differences) for chart in charts]


def charts_of(runs: Sequence[RunReport]) -> list[Chart]:
    """Returns the charts of one run, or of several in the same axes; charts without points are
    omitted."""
    charts = [_loss(runs), *_held_out(runs)]
    usual = (
        Chart("grad_norm", "Gradient norm", note="before clipping"),
        Chart("lr", "Learning rate"),
        Chart("tokens_per_second", "Throughput", "tokens/s per device", form="count"),
        Chart("samples_per_second", "Throughput", "samples/s per device", form="count"),
        Chart("mfu", "Model FLOPs utilization (MFU)", form="share"),
        Chart("memory_gib", "Memory", "GiB per device, peak"),
        Chart("data_wait", "Waiting for data", "of the time", form="share"),
        Chart("skipped_steps", "Steps skipped", "non-finite, since the last log", form="count"),
        Chart("empty_steps", "Steps without target tokens", "since the last log", form="count"),
        Chart(
            "skipped_documents", "Documents skipped", "empty or unreadable, so far", form="count"
        ),
    )
    for chart in usual:
        for number, run in enumerate(runs):
            chart.lines += _logged(run, number, chart.id, len(runs) > 1)
    rare = ("skipped_steps", "empty_steps", "skipped_documents")
    charts += [
        one
        for one in usual
        if one.id not in rare or any((line.values > 0).any() for line in one.lines)
    ]
    found = [*charts, *_others(runs), *_scores(runs)]
    return [one for one in found if any(len(line.steps) or line.odd for line in one.lines)]


def _loss(runs: Sequence[RunReport]) -> Chart:
    last = max((float(run.lines.logged.last_step) for run in runs), default=0.0)
    spacing = max((spacing_of(run.lines.logged.points("loss")[0]) for run in runs), default=1.0)
    fine, coarse = bin_sizes(last, spacing)
    chart = Chart("loss", "Training loss", note=_bins_in_words(fine, coarse))
    several = len(runs) > 1
    for number, run in enumerate(runs):
        prefix = prefix_of(run, several)
        steps, losses = run.lines.logged.points("loss")
        odd = _odd(run.lines.logged, "loss")
        raw = Line(f"{prefix}each step logged", number, number, "raw", steps, losses, odd,
                   not several or fine == 1)  # fmt: skip
        mean = Line(
            f"{prefix}mean of {fine:,} steps", number, number, "mean", *means(steps, losses, fine)
        )
        trend = Line(f"{prefix}mean of {coarse:,} steps", number, number if several else 1, "trend",
                     *means(steps, losses, coarse), shown=not several)  # fmt: skip
        chart.lines += [raw, *([mean] if fine > 1 else ()), *([trend] if coarse > 1 else ())]
        for line in _lost(run, number, f"{prefix}lost steps"):
            line.shown = not several
            chart.lines.append(line)
    return chart


def prefix_of(run: RunReport, several: bool) -> str:
    """Returns what the names of a run's lines begin with, if there are several runs."""
    return f"{run.name}: " if several else ""


def _bins_in_words(fine: int, coarse: int) -> str:
    sizes = [f"{size:,}" for size in (fine, coarse) if size > 1]
    if not sizes:
        return "too few values for a mean"
    words = f"means of the values logged in the last {' and the last '.join(sizes)} steps"
    return words + ("" if (fine, coarse) == (100, 15_000) else ", chosen for the length of the run")


def _lost(run: RunReport, number: int, name: str) -> list[Line]:
    """Returns a line for each session that lost steps, all with the same name."""
    lost, found = run.lines.lost, []
    times, all_steps, losses = lost["time"], lost.steps, lost["loss"]
    for session, border in with_borders(run.sessions):
        mine = (times >= session.begun) & (times < border) & np.isfinite(losses)
        steps, where = np.unique(all_steps[mine], return_index=True)
        if len(steps):
            values = losses[mine][where]
            found.append(Line(name, number, LOST, "lost", steps, values, session=session.number))
    return found[-MOST_LOST:]


def _held_out(runs: Sequence[RunReport]) -> list[Chart]:
    """Returns one chart for all held-out losses, and one for each other held-out metric."""
    charts: dict[str, Chart] = {}
    for number, run in enumerate(runs):
        names = list(run.lines.held_out)
        sets = [name for name in names if name.startswith(f"{VALIDATION_LOSS}/")]
        for name in names:
            kind, which = _measured(name)
            if kind == VALIDATION_LOSS and not which and len(sets) == 1:
                continue  # the mean of a single set
            if name not in sets and f"{kind}/{which}" in sets:
                continue  # the same loss under another name
            title = "Validation loss" if kind == VALIDATION_LOSS else kind.replace("_", " ")
            chart = charts.setdefault(
                kind, Chart(f"held_out.{kind}", title[:1].upper() + title[1:])
            )
            columns = run.lines.held_out[name]
            steps, values = columns.points("value")
            label = which or ("mean (selects the best checkpoint)" if sets else kind)
            line = Line(label, number, len(chart.lines), "points", steps, values)
            line.odd = _odd(columns, "value")
            _add(line, chart, runs)
    return list(charts.values())


def _add(line: Line, chart: Chart, runs: Sequence[RunReport]) -> None:
    """Adds a line, with the name and in the color of its run if there are several runs."""
    if len(runs) > 1:
        line.name = f"{runs[line.run].name}: {line.name}"
        line.color, line.dash = line.run, sum(one.run == line.run for one in chart.lines)
    chart.lines.append(line)


def _measured(name: str) -> tuple[str, str]:
    """Splits a name such as `validation/wiki/perplexity` or `validation_loss/wiki` into what was
    measured and on which set."""
    if name.startswith(VALIDATION):
        which, _, kind = name.removeprefix(VALIDATION).rpartition("/")
        return f"validation_{kind}", which
    kind, _, which = name.partition("/")
    return kind, which


def _logged(run: RunReport, number: int, name: str, several: bool) -> list[Line]:
    """Returns the line of a logged metric; if it has too many points to distinguish, also a line of
    means."""
    if name not in run.lines.logged.names:
        return []
    steps, values = run.lines.logged.points(name)
    odd = _odd(run.lines.logged, name)
    label = run.name if several else name.replace("_", " ")
    line = Line(label, number, number, "curve", steps, values, odd)
    if len(steps) <= MANY or name in SMOOTH:
        return [line]
    line.kind, line.shown = "raw", not several
    line.name = f"{prefix_of(run, several)}each step logged"
    size = max(100, rounded(steps[-1] / 500))
    label = f"{prefix_of(run, several)}mean of {size:,} steps"
    return [line, Line(label, number, number, "mean", *means(steps, values, size))]


def _others(runs: Sequence[RunReport]) -> list[Chart]:
    """Returns charts of metrics that objectives and models log under their own names."""
    names = {
        name
        for run in runs
        for name in run.lines.logged.names
        if name not in METRIC_NAMES and not name.startswith("seconds/")
    }
    charts = []
    for name in sorted(names)[:MOST_OTHERS]:
        chart = Chart(f"other.{name}", name.replace("_", " "), note="logged by the objective")
        for number, run in enumerate(runs):
            chart.lines += _logged(run, number, name, len(runs) > 1)
        charts.append(chart)
    return charts


def _scores(runs: Sequence[RunReport]) -> list[Chart]:
    """Returns a chart per metric for evaluations of several checkpoints."""
    charts: dict[str, Chart] = {}
    for number, run in enumerate(runs):
        for metric, name in dict.fromkeys((one.metric, one.name) for one in run.scores):
            mine = [one for one in run.scores if (one.metric, one.name) == (metric, name)]
            if len({one.step for one in mine}) < 2:
                continue
            chart = charts.setdefault(metric, Chart(f"score.{metric}", f"Evaluation: {metric}"))
            steps = np.array([one.step for one in mine], np.float64)
            values = np.array([one.value for one in mine])
            _add(Line(name, number, len(chart.lines), "points", steps, values), chart, runs)
    return list(charts.values())[:MOST_OTHERS]


def _odd(columns: MetricColumns, name: str) -> list[tuple[int, str]]:
    odd = columns.odd.get(name, [])
    return [(step, "NaN" if np.isnan(value) else "infinite") for step, value in odd]
