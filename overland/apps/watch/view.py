"""Draws a run's status in the terminal: the lines, their words and colors, and the loss curve;
`status.py` determines the numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from overland.apps.watch.history import thinned
from overland.apps.watch.status import STATES, RunStatus, transferred
from overland.words import duration, number_of

COLORS = {
    "training": "green",
    "finished": "green",
    "starting": "cyan",
    "stopping": "cyan",
    "waiting": "cyan",
    "restarting": "yellow",
    "stopped": "yellow",
    "failed": "red",
    "silent": "red",
}
SHOWN_FAULTS = 5
MOST_MARKS = 40
MARK = "◆"
MOST_RESULTS = 6
DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # by column, from the bottom up

Points = Sequence[tuple[float, float]]
Parts = Iterator[str | tuple[str, str]]
"""Texts, some with a style."""


def draw(seen: RunStatus, width: int, curve_height: int = 10) -> RenderableType:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim")
    rows.add_column()
    rows.add_row("step", step_line(seen))
    for name, (parts_of, between) in LINES.items():
        if found := [Text.assemble(part) for part in parts_of(seen)]:
            rows.add_row(name, Text(between).join(found))
    parts: list[RenderableType] = [headline(seen), Text(), rows]
    marks = [point for points in seen.held_out.values() for point in thinned(points, MOST_MARKS)]
    if drawn := draw_curve(seen.losses, marks, min(width, 110), curve_height):
        legend = f"loss   {MARK} {', '.join(seen.held_out)}, held out" if marks else "loss"
        picture = Text("\n".join([legend, *drawn]))
        picture.highlight_regex(MARK, "yellow")
        picture.highlight_regex("[\u2800-\u28ff]+", "cyan")
        parts += [Text(), picture]
    return Group(*parts)


def headline(seen: RunStatus) -> Text:
    color = COLORS[seen.state]
    text = Text.assemble((f"● {STATES[seen.state]}", f"bold {color}"))
    if seen.state == "silent" and seen.last_sign:
        text.append(f" since {moment(seen.last_sign, seen.time)}", style=color)
    if seen.because:
        text.append(f": {seen.because}", style=color)
    text.append(f"   {seen.run}", style="bold")
    if seen.description:
        text.append(f"   {seen.description}", style="dim")
    return text


def step_line(seen: RunStatus) -> RenderableType:
    if not seen.steps:
        return Text(f"{seen.step:,}")
    if seen.step > seen.steps:
        return Text(f"{seen.step:,}; training.steps = {seen.steps:,} was set later")
    line = Table.grid(padding=(0, 2))
    share = seen.step / seen.steps
    line.add_row(
        f"{seen.step:,} of {seen.steps:,}",
        ProgressBar(total=seen.steps, completed=min(seen.step, seen.steps), width=30),
        f"{share:.1%}",
        time_left(seen),
    )
    return line


def time_left(seen: RunStatus) -> str:
    if seen.seconds_left is None:
        return ""
    left = duration(seen.seconds_left)
    if seen.state != "training" or seen.because:  # unknown when it will continue
        return f"{left} of training left"
    return f"{left} left, until {moment(seen.time + seen.seconds_left, seen.time)}"


def session_parts(seen: RunStatus) -> Parts:
    if seen.session:
        yield str(seen.session)
    if seen.attempt:
        yield f"attempt {seen.attempt}"
    if seen.job:
        yield f"job {seen.job}"
    if seen.ranks:
        yield number_of(seen.ranks, "rank")
    if seen.nodes:
        shown = ", ".join(seen.nodes[:4]) + (", …" if len(seen.nodes) > 4 else "")
        yield f"{number_of(len(seen.nodes), 'node')} ({shown})"
    is_over = seen.state in ("finished", "stopped", "failed", "waiting")
    if seen.session_ends and seen.session_ends > seen.time and not is_over:
        yield f"ends in {duration(seen.session_ends - seen.time)}"


def loss_parts(seen: RunStatus) -> Parts:
    newest = seen.newest
    if "loss" not in newest:
        return
    yield f"{newest['loss']:.4f}"
    yield from (f"{name} {points[-1][1]:.4f}" for name, points in seen.held_out.items() if points)
    for name, label in (("grad_norm", "gradient norm"), ("lr", "learning rate")):
        if isinstance(newest.get(name), int | float):
            yield f"{label} {newest[name]:.3g}"
    for name, label in (("skipped_steps", "skipped"), ("empty_steps", "without target tokens")):
        if number := newest.get(name):
            yield f"{number_of(number, 'step')} {label}"


def speed_parts(seen: RunStatus) -> Parts:
    newest = seen.newest
    for unit in ("tokens", "samples"):
        if rate := newest.get(f"{unit}_per_second"):
            yield f"{rate:,.0f} {unit}/s per device"
    if (mfu := newest.get("mfu")) is not None:
        yield f"MFU {mfu:.1%}"
    if seen.step_seconds:
        yield f"{seen.step_seconds:.3g} s per step"
    if seen.stepped and seen.state != "finished":
        yield f"last step {duration(seen.time - seen.stepped)} ago"
    if (memory := newest.get("memory_gib")) is not None:
        yield f"memory {memory:.1f} GiB"
    if (newest.get("data_wait") or 0) > 0.02:
        yield f"{newest['data_wait']:.0%} of the time waiting for data"


def slowest_parts(seen: RunStatus) -> Parts:
    if seen.slowest:
        factor = seen.slowest.get("factor", 0)
        words = f"{rank_of(seen.slowest)}, {factor:.2f} × the median"
        yield words, "yellow" if factor > 1.2 else ""
    for one in seen.late[:3]:
        yield f"{rank_of(one)} is late: {one.get('seconds', 0):.0f} s in {one.get('phase')}", "red"


def rank_of(told: Mapping[str, Any]) -> str:
    return f"rank {told.get('rank')} on {told.get('node')}"


def checkpoint_parts(seen: RunStatus) -> Parts:
    found = seen.checkpoints
    if found.newest and found.saved_at:
        yield f"{found.newest}, {duration(seen.time - found.saved_at)} ago"
        yield f"{found.count} in total"
    if found.saving:
        yield f"saving {found.saving}" + (
            f": {transferred(seen.transfer)}" if seen.transfer else ""
        )
    if found.not_finite:
        yield f"{found.not_finite} is NOT FINITE; a resume skips it", "bold red"


def evaluation_parts(seen: RunStatus) -> Parts:
    """Yields the newest perplexity on each dataset."""
    found = [one for one in seen.evaluations if isinstance(one.get("perplexity"), int | float)]
    for one in found[:MOST_RESULTS]:
        yield f"{one['name']} perplexity {one['perplexity']:,.2f} at step {one['step']:,}"
    if len(found) > MOST_RESULTS:
        yield f"and {len(found) - MOST_RESULTS:,} more"


def slurm_parts(seen: RunStatus) -> Parts:
    jobs = seen.queue or []
    yield from (f"{job.id} {job.state}, {job.left} left" for job in jobs if job.runs)
    waiting = [job for job in jobs if not job.runs]
    for job in waiting[:2]:
        start = "" if job.start in ("N/A", "") else f", expected {job.start.replace('T', ' ')}"
        yield f"{job.id} {job.state} ({job.reason}){start}"
    if len(waiting) > 2:
        yield f"and {len(waiting) - 2} more waiting"


def fault_parts(seen: RunStatus) -> Parts:
    if len(seen.faults) > SHOWN_FAULTS:
        yield f"{len(seen.faults)} in total; the last {SHOWN_FAULTS}:"
    for fault in seen.faults[-SHOWN_FAULTS:]:
        excluded = ", ".join(fault.get("excluded") or [])
        action = str(fault.get("action", ""))
        action = "requeued" if action == "requeue" else action
        action += f" without {excluded}" if excluded else ""
        if fault.get("lost_seconds") is not None:
            action += f", {duration(fault['lost_seconds'])} lost"
        when = moment(float(fault.get("time", 0)), seen.time)
        what = str(fault.get("what", ""))
        yield f"{when} {fault.get('kind')} at step {fault.get('step')}: {what} → {action}"


# What each line says, and what is between its parts.
LINES: dict[str, tuple[Callable[[RunStatus], Parts], str]] = {
    "to resume": (lambda seen: iter([seen.resume] if seen.resume else []), ""),
    "loss": (loss_parts, "   "),
    "speed": (speed_parts, "   "),
    "session": (session_parts, ", "),
    "slowest": (slowest_parts, "   "),
    "checkpoints": (checkpoint_parts, "   "),
    "evaluation": (evaluation_parts, "\n"),
    "Slurm": (slurm_parts, "\n"),
    "faults": (fault_parts, "\n"),
}


def moment(then: float, now: float) -> str:
    """Returns the time of day, with the date if it is not today."""
    shown, today = time.localtime(then), time.localtime(now)
    return time.strftime("%H:%M" if shown[:3] == today[:3] else "%a %d %b %H:%M", shown)


def finished_words(seen: RunStatus) -> str:
    words = f"Finished: {seen.step:,} {'step' if seen.step == 1 else 'steps'} in {seen.run}"
    if "loss" in seen.newest:
        words += f", with a loss of {seen.newest['loss']:.4f}"
    return f"{words}; {seen.because}." if seen.because else f"{words}."


def draw_curve(points: Points, marks: Points, width: int, height: int) -> list[str]:
    """Draws a curve in braille dots, two across and four up in each character.

    Returns rows from the top, with their values on the left and the first and last x below. `marks`
    are single points of another series. Returns nothing if there are no points."""
    points = [(x, y) for x, y in points if math.isfinite(y)]
    marks = [(x, y) for x, y in marks if math.isfinite(y)]
    if not points:
        return []
    left, right = points[0][0], max(points[-1][0], points[0][0] + 1)
    marks = [(x, y) for x, y in marks if left <= x <= right]
    label_width = 8
    columns = max(2, width - label_width - 1)
    heights = _column_means(points, left, right, 2 * columns)
    low = min([*heights, *(y for _, y in marks)])
    high = max([*heights, *(y for _, y in marks)])
    span = (high - low) or 1.0
    rows = [[0x2800] * columns for _ in range(height)]
    before = None
    for dot_column, y in enumerate(heights):
        up = round((y - low) / span * (4 * height - 1))
        first, last = sorted((up, before if before is not None else up))
        for dot in range(first, last + 1):  # so that steep parts stay connected
            row = rows[height - 1 - dot // 4]
            row[dot_column // 2] |= DOTS[dot_column % 2][dot % 4]
        before = up
    drawn = [[chr(cell) for cell in row] for row in rows]
    for x, value in marks:
        column = round((x - left) / (right - left) * (columns - 1))
        drawn[height - 1 - int((value - low) / span * (height - 0.01))][column] = MARK
    values = [high - span * row / max(1, height - 1) for row in range(height)]
    shown = [
        f"{value:>{label_width}.4g}" if row % 3 == 0 or row == height - 1 else " " * label_width
        for row, value in enumerate(values)
    ]
    below = f"{points[0][0]:,.0f}"
    below += f"{points[-1][0]:,.0f}".rjust(columns - len(below))
    return [
        *(f"{label} {''.join(row)}" for label, row in zip(shown, drawn, strict=True)),
        " " * (label_width + 1) + below,
    ]


def _column_means(points: Points, left: float, right: float, num: int) -> list[float]:
    """Returns the mean of each column of dots; columns without points are interpolated."""
    sums, counts = [0.0] * num, [0] * num
    for x, y in points:
        column = min(num - 1, int((x - left) / (right - left) * num))
        sums[column] += y
        counts[column] += 1
    known = [(i, sums[i] / counts[i]) for i in range(num) if counts[i]]
    means = []
    for (i, y), (j, z) in zip(known, [*known[1:], (num, known[-1][1])], strict=True):
        means += [y + (z - y) * k / (j - i) for k in range(j - i)]
    return means
