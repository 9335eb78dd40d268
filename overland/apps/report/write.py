"""Writes a report: the page, its plots and its numbers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from overland.apps.report.charts import charts_of, charts_to_json
from overland.apps.report.page import build_page
from overland.apps.report.summary import RunReport
from overland.apps.report.svg import chart_svg, timeline_svg
from overland.apps.watch.files import finite
from overland.errors import ReportError, sentence
from overland.files import replace_file

LONGEST_NAME = 60  # characters, of up to four bytes each


def write_page(runs: Sequence[RunReport], path: Path) -> Path:
    if path.is_dir():
        raise ReportError(f"--output {path} is a folder: name a file, such as {path}/report.html")
    _write(path, build_page(runs), "use --output to write another file")
    return path


def write_plots(runs: Sequence[RunReport], folder: Path) -> list[Path]:
    """Writes each plot as a standalone SVG."""
    plots = {chart.id: chart_svg(chart) for chart in charts_of(runs)}
    for run in runs:
        name = "timeline" if len(runs) == 1 else f"timeline.{run.name}"
        if drawn := timeline_svg(run):
            plots[name] = drawn
    written: list[Path] = []
    for name, drawn in plots.items():
        written.append(folder / f"{_file_name(name, {one.stem.lower() for one in written})}.svg")
        _write(written[-1], drawn, "use --svg to write to another folder")
    return written


def _file_name(name: str, taken: Collection[str]) -> str:
    """Returns a file name that is valid on any file system, with a number if it is taken."""
    stem = found = re.sub(r"[^\w.-]+", "_", name)[:LONGEST_NAME]
    for number in itertools.count(2):
        if found.lower() not in taken:
            break
        found = f"{stem}-{number}"
    return found


def _write(path: Path, content: str, way_out: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content, durable=False)
    except OSError as error:
        raise ReportError(f"{sentence(error)}; {way_out}") from None


def numbers_of(runs: Sequence[RunReport]) -> dict[str, Any]:
    """Returns everything a page shows, for programs. Non-finite numbers become null."""
    found = {
        "runs": [run.to_json() for run in runs],
        "charts": [_whole_steps(chart) for chart in charts_to_json(charts_of(runs))],
    }
    value: dict[str, Any] = finite(found)
    return value


def _whole_steps(chart: dict[str, Any]) -> dict[str, Any]:
    """Restores absolute steps; a page stores differences, which are shorter."""
    for line in chart["lines"]:
        total = 0.0
        line["steps"] = [round(total := total + step, 2) for step in line["steps"]]
    return chart
