"""Draws charts, the timeline and the bar of time as SVG: their size, axes, ticks and colors.
Standalone files have fixed colors, for papers and programs without style sheets; in a page they use
the page's colors, light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from overland.apps.report.charts import LOST, Chart, Line
from overland.apps.report.lines import Numbers, thinned
from overland.apps.report.sessions import ReportedSession
from overland.apps.report.summary import RunReport, moment
from overland.words import visible

# The color-blind-safe palette of Okabe and Ito, without black and yellow.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d46")
NAMED = {
    "ink": "#1c1d1f",
    "muted": "#6b6e75",
    "line": "#e2e2de",
    "lost": "#b5482a",
    "paper": "#ffffff",
    "band": "#e8f1f7",
    "start": "#d3d6da",
}
WIDTH, HEIGHT = 860, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 56, 46
MOST_POINTS = 1500
MOST_DOTS = 60
WIDTHS = {"raw": 1.0, "mean": 1.6, "trend": 2.4, "curve": 1.3, "points": 1.8, "lost": 1.2}
DASHES = ("none", "7 4", "2 3", "9 3 2 3")
MOST_MARKS = 400
SMALLEST = 1e-300  # distance between two ticks, close to the smallest float64

Paint = Callable[[str | int], str]


def in_page(name: str | int) -> str:
    """Returns a color as a variable of the page's style sheet."""
    return f"var(--{name})" if isinstance(name, str) else f"var(--c{name % len(PALETTE)})"


def alone(name: str | int) -> str:
    return NAMED[name] if isinstance(name, str) else PALETTE[name % len(PALETTE)]


def chart_svg(chart: Chart, paint: Paint = alone) -> str:
    """Returns a chart as an SVG with title, legend and axes."""
    shown = [(line, *thinned(line.steps, line.values, MOST_POINTS)) for line in chart.lines
             if line.shown and len(line.steps)]  # fmt: skip
    all_steps = np.concatenate([steps for _, steps, _ in shown] or [np.zeros(1)])
    all_values = np.concatenate([values for *_, values in shown] or [np.zeros(1)])
    x_ticks = ticks(float(all_steps.min()), float(all_steps.max()))
    y_ticks = ticks(float(all_values.min()), float(all_values.max()), 5)
    right = max(float(all_steps.max()), x_ticks[0] + 1)

    def x_of(steps: Numbers) -> Numbers:
        return LEFT + (steps - x_ticks[0]) / (right - x_ticks[0]) * (WIDTH - LEFT - RIGHT)

    def y_of(values: Numbers) -> Numbers:
        share = (values - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    title = f"{chart.title}{f', {chart.unit}' if chart.unit else ''}"
    parts = [_open(WIDTH, HEIGHT, title, paint), _text(LEFT, 24, title, paint("ink"), size=16)]
    for y in y_ticks:
        parts += _y_tick(float(y_of(np.array(y))), value_words(y, chart.form), paint)
    for x in (one for one in x_ticks if one <= right):
        words = f"{x:,.12g}"
        at = float(x_of(np.array(x)))
        parts.append(_text(at, HEIGHT - BOTTOM + 20, words, paint("muted"), "middle"))
    parts.append(
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, chart.across, paint("muted"), "middle")
    )
    across, named = float(LEFT), set()
    for line, steps, values in shown:
        color = paint("lost" if line.color == LOST else line.color)
        parts.append(_path(line, x_of(steps), y_of(values), color))
        if line.name not in named and across < WIDTH - 60:
            named.add(line.name)
            parts.append(_text(across, 44, f"— {line.name}", color, size=12))
            across += 26 + 6.6 * len(line.name)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _path(line: Line, x: Numbers, y: Numbers, color: str) -> str:
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))
    faint = {"raw": ' opacity="0.35"', "lost": ' stroke-dasharray="2 2"'}.get(line.kind, "")
    faint += f' stroke-dasharray="{DASHES[line.dash % len(DASHES)]}"' if line.dash else ""
    drawn = (
        f'<polyline points="{points}" fill="none" stroke="{color}"{faint} '
        f'stroke-width="{WIDTHS[line.kind]}" stroke-linejoin="round"/>'
    )
    if len(x) <= MOST_DOTS and line.kind in ("points", "mean", "trend"):
        drawn += "".join(
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" fill="{color}"/>'
            for a, b in zip(x.tolist(), y.tolist(), strict=True)
        )
    return drawn


# Timeline


def timeline_svg(report: RunReport, paint: Paint = alone) -> str:
    """Draws steps over time: a band per session, a line that falls back where steps were lost, and
    marks for saves and faults. Returns "" if there are no sessions."""
    sessions = report.sessions
    if not sessions:
        return ""
    width, height, top, bottom = WIDTH, 230, 40, 62
    begin, end = min(one.begun for one in sessions), max(one.ended for one in sessions)
    span = max(end - begin, 1.0)
    highest = max(report.status.steps or 0, *(one.last_step for one in sessions), 1)

    def x_of(moment: float) -> float:
        return LEFT + (moment - begin) / span * (width - LEFT - RIGHT)

    def y_of(step: float) -> float:
        return height - bottom - step / highest * (height - top - bottom)

    parts = [_open(width, height, "History of the run: steps over time", paint)]
    for step in ticks(0.0, float(highest), 3):
        if step <= highest:
            parts += _y_tick(y_of(step), f"{step:,.12g}", paint)
    for session in sessions:
        parts += _band(session, x_of, top, height - bottom, paint)
    for columns, color, stroke in (
        (report.lines.lost, paint("lost"), ' stroke-dasharray="3 2"'),
        (report.lines.logged, paint(0), ""),
    ):
        times, steps = columns["time"], columns.steps
        for session in sessions:
            mine = (times >= session.begun) & (times <= session.ended + 1e-3)
            kept, at = (one.tolist() for one in thinned(steps[mine], times[mine], 300))
            drawn = " ".join(f"{x_of(t):.1f},{y_of(s):.1f}" for t, s in zip(at, kept, strict=True))
            if drawn:
                parts.append(
                    f'<polyline points="{drawn}" fill="none" stroke="{color}"{stroke} '
                    'stroke-width="2" stroke-linejoin="round" stroke-linecap="round"/>'
                )
    parts += _marks(report, x_of, height - bottom, paint)
    first, last = moment(begin), moment(end)
    parts.append(_text(LEFT, height - 22, first, paint("muted")))
    parts.append(_text(width - RIGHT, height - 22, last, paint("muted"), "end"))
    parts.append(_text(LEFT, height - 6, "│ saved   ▲ fault, kill or rewind   - - lost steps",
                       paint("muted"), size=11))  # fmt: skip
    return "\n".join([*parts, "</svg>"]) + "\n"


def _band(
    session: ReportedSession,
    x_of: Callable[[float], float],
    top: float,
    bottom: float,
    paint: Paint,
) -> list[str]:
    left, ready, right = (x_of(one) for one in (session.begun, session.started, session.ended))
    what = (
        f"session {session.number}: steps {session.step:,} to {session.last_step:,}, {session.how}"
    )
    what += f" ({session.what})" if session.what else ""
    parts = [
        f"<g><title>{escape(visible(what))}</title>",
        f'<rect x="{left:.1f}" y="{top}" width="{max(0.6, ready - left):.1f}" '
        f'height="{bottom - top}" fill="{paint("start")}" opacity="0.6"/>',
        f'<rect x="{ready:.1f}" y="{top}" width="{max(0.6, right - ready):.1f}" '
        f'height="{bottom - top}" fill="{paint("band")}"/></g>',
    ]
    if right - left > 14:
        parts.append(_text((left + right) / 2, top - 8, str(session.number), paint("muted"),
                           "middle", 12))  # fmt: skip
    return parts


def _marks(
    report: RunReport, x_of: Callable[[float], float], bottom: float, paint: Paint
) -> list[str]:
    parts = []
    saves = [one for one in report.happenings if one.kind == "save"]
    bad = [one for one in report.happenings if one.kind in ("fault", "killed", "failed", "rewind")]
    for one in saves[:: -(-len(saves) // MOST_MARKS) or 1]:
        x = x_of(one.time)
        parts.append(
            f'<line x1="{x:.1f}" y1="{bottom + 2:.1f}" x2="{x:.1f}" y2="{bottom + 8:.1f}" '
            f'stroke="{paint("muted")}"><title>{escape(one.what)}</title></line>'
        )
    for one in bad[-MOST_MARKS:]:
        x = x_of(one.time)
        parts.append(
            f'<path d="M{x - 5:.1f},{bottom + 20:.1f} l5,-9 l5,9 z" fill="{paint("lost")}">'
            f"<title>{escape(visible(f'{one.kind} at step {one.step}: {one.what}'))}</title></path>"
        )
    return parts


def stacked_bar(parts: Sequence[tuple[str, float, str | int]], paint: Paint = in_page) -> str:
    """Draws a stacked bar of parts, each with a name, a number and a color."""
    total = sum(value for _, value, _ in parts) or 1.0
    drawn, across = [], 0.0
    for name, value, color in parts:
        width = value / total * 1000
        if width > 0:
            drawn.append(
                f'<rect x="{across:.2f}" y="0" width="{max(width - 1.5, 0.5):.2f}" height="26" '
                f'fill="{paint(color)}"><title>{escape(name)} {value / total:.1%}</title></rect>'
            )
        across += width
    words = ", ".join(f"{name} {value / total:.1%}" for name, value, _ in parts)
    return (
        f'<svg class="bar" viewBox="0 0 1000 26" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(words)}">{"".join(drawn)}</svg>'
    )


def ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Returns round numbers that enclose [low, high]."""
    span = high - low if high - low > 1e-9 * abs(high) else abs(high) or 1.0
    raw = max(span / wanted, SMALLEST)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1)]


def value_words(value: float, form: str) -> str:
    if form == "share":
        return f"{value:.4g}" if not math.isfinite(value) else f"{value * 100:.3g}%"
    if form == "count":
        return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
    return f"{value:.5g}"


def _open(width: float, height: float, title: str, paint: Paint) -> str:
    paper = f'<rect width="{width}" height="{height}" fill="{paint("paper")}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">\n'
        f"<title>{escape(visible(title))}</title>{paper if paint is alone else ''}"
    )


def _text(x: float, y: float, words: str, color: str, anchor: str = "start", size: int = 13) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{color}">{escape(visible(words))}</text>'
    )


def _y_tick(y: float, words: str, paint: Paint) -> list[str]:
    """Draws a line across the picture, and on its left the value that it stands for."""
    rule = (
        f'<line x1="{LEFT:.1f}" y1="{y:.1f}" x2="{WIDTH - RIGHT:.1f}" y2="{y:.1f}" '
        f'stroke="{paint("line")}" stroke-width="1"/>'
    )
    return [rule, _text(LEFT - 8, y + 4, words, paint("muted"), "end")]
