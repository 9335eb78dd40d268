"""The loss plot of a run folder: a line chart as SVG, drawn without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from overland.files import replace_file
from overland.training.callbacks import Callback
from overland.training.history import History, thinned

if TYPE_CHECKING:
    from overland.training.run import Run

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 52, 48
COLORS = ("#1f5fa8", "#c8553d", "#3d8b5f", "#7a5195", "#b58900")
MOST_POINTS = 2000  # per line: more than the pixels of a screen only makes the file larger
MOST_DOTS = 60  # a line with at most this many points also marks each of them
SMALLEST = 1e-300  # distance between two ticks, close to the smallest float64

Points = Sequence[tuple[float, float]]


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
    lines = {"training": history.losses} if history.losses else {}
    lines |= {f"held out: {name}": points for name, points in history.held_out.items() if points}
    replace_file(target, line_chart(lines, title, "step", "loss"), durable=False)


def line_chart(lines: Mapping[str, Points], title: str, x_label: str, y_label: str) -> str:
    """Returns the chart as SVG text. Points that are not finite are left out."""
    kept = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in lines.items()}
    drawn = {name: thinned(points, MOST_POINTS) for name, points in kept.items() if points}
    flat = [point for points in drawn.values() for point in points] or [(0.0, 0.0)]
    last = max(x for x, _ in flat)
    x_ticks = ticks(min(x for x, _ in flat), last)
    y_ticks = ticks(min(y for _, y in flat), max(y for _, y in flat))
    # Lines reach the right edge; the y axis ends at a round number.
    right = last if last > x_ticks[0] else x_ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_ticks[0]) / (right - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return (
            LEFT + across * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="28" font-size="16" fill="#222">{escape(title)}</text>',
    ]
    for y in y_ticks:
        left, height = at(x_ticks[0], y)
        color = "#999" if y == y_ticks[0] else "#e4e4e4"
        parts.append(
            f'<line x1="{left:.1f}" y1="{height:.1f}" x2="{WIDTH - RIGHT}" y2="{height:.1f}" '
            f'stroke="{color}"/><text x="{left - 8:.1f}" y="{height + 4:.1f}" '
            f'text-anchor="end" fill="#555">{y:g}</text>'
        )
    for x in (tick for tick in x_ticks if tick <= right):
        across, bottom = at(x, y_ticks[0])
        parts.append(
            f'<text x="{across:.1f}" y="{bottom + 20:.1f}" text-anchor="middle" '
            f'fill="#555">{x:,.12g}</text>'
        )
    for number, (name, points) in enumerate(drawn.items()):
        color = COLORS[number % len(COLORS)]
        places = [at(x, y) for x, y in points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2" '
            f'stroke-linejoin="round"/>'
        )
        if len(places) <= MOST_DOTS:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"/>'
                      for a, b in places]  # fmt: skip
        parts.append(
            f'<text x="{WIDTH - RIGHT - 6}" y="{TOP + 18 * number + 18}" text-anchor="end" '
            f'fill="{color}">{escape(name)}, last {points[-1][1]:.4g}</text>'
        )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle" '
        f'fill="#555">{escape(x_label)}</text><text x="16" y="{middle}" text-anchor="middle" '
        f'fill="#555" transform="rotate(-90 16 {middle})">{escape(y_label)}</text></svg>'
    )
    return "\n".join(parts) + "\n"


def ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Returns round numbers that enclose [low, high]."""
    span = high - low if high - low > 1e-9 * abs(high) else abs(high) or 1.0
    raw = max(span / wanted, SMALLEST)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1)]
