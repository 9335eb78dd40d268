"""The status line at the bottom of the terminal while a run trains: a bar as wide as the terminal,
with numbers next to it. In a narrow terminal the least important numbers are left out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.text import Text

from overland.words import clock

GAP = 2
SHORTEST_BAR, SHORTEST_SPARKLINE, LONGEST_SPARKLINE = 8, 8, 24
LEVELS = "▁▂▃▄▅▆▇█"
# In order of importance: the last ones are dropped first.
KEPT = ("doing", "step", "loss", "left", "sparkline", "speed", "bar", "elapsed", "lr", "grad",
        "mfu", "memory", "epoch", "others")  # fmt: skip
SHOWN = ("doing", "bar", "step", "epoch", "loss", "sparkline", "lr", "grad", "speed", "mfu",
         "memory", "others", "elapsed", "left")  # fmt: skip
COLORS = {"doing": "cyan", "step": "green", "sparkline": "cyan", "left": "cyan"}


@dataclass
class Status:
    """What is known about a run so far; None for what is not known yet."""

    step: int
    steps: int
    doing: str = ""
    """What the run is waiting for, if it is not simply training."""
    epoch: float | None = None
    loss: float | None = None
    losses: Sequence[float] = field(default_factory=list)
    """Recent losses, for the sparkline."""
    lr: float | None = None
    grad_norm: float | None = None
    speed: str = ""
    mfu: float | None = None
    memory_gib: float | None = None
    elapsed: float | None = None
    left: float | None = None
    others: str = ""


def draw(status: Status, width: int, is_ascii: bool = False) -> Text:
    """Returns one line of `width` cells with the columns that fit, chosen in the order of `KEPT`;
    the bar fills the remaining space."""
    columns = {name: text for name, text in _columns(status, is_ascii).items() if text}
    chosen: dict[str, str] = {}
    room = width + GAP
    for name in KEPT:
        needed = len(columns.get(name, "")) + GAP
        if name in columns and needed <= room:
            chosen[name] = columns[name]
            room -= needed
    more = min(room // 3, LONGEST_SPARKLINE - SHORTEST_SPARKLINE)
    if "sparkline" in chosen and "bar" in chosen and more > 0:
        longer = sparkline(status.losses, SHORTEST_SPARKLINE + more)
        room -= len(longer) - len(chosen["sparkline"])
        chosen["sparkline"] = longer
    line = Text(no_wrap=True, overflow="crop")
    for name in SHOWN:
        if name not in chosen:
            continue
        if line:
            line.append(" " * GAP)
        if name == "bar":
            share = min(1.0, status.step / max(1, status.steps))
            line.append_text(_bar(share, SHORTEST_BAR + room, is_ascii))
        else:
            line.append(chosen[name], style=COLORS.get(name, ""))
    line.truncate(width)
    return line


def _columns(status: Status, is_ascii: bool) -> dict[str, str]:
    loss = status.loss
    return {
        "doing": status.doing,
        "bar": " " * SHORTEST_BAR if not status.doing else "",
        "step": f"{status.step:,}/{status.steps:,}",
        "epoch": "" if status.epoch is None else f"epoch {status.epoch:.2f}",
        "loss": "" if loss is None else f"loss~{loss:.4f}" if loss < 1e4 else f"loss {loss:.4g}",
        "sparkline": "" if is_ascii else sparkline(status.losses, SHORTEST_SPARKLINE),
        "lr": "" if status.lr is None else f"lr {status.lr:.2e}",
        "grad": "" if status.grad_norm is None else f"grad {status.grad_norm:.2f}",
        "speed": status.speed,
        "mfu": "" if status.mfu is None else f"MFU {status.mfu:.1%}",
        "memory": "" if status.memory_gib is None else f"{status.memory_gib:.1f} GiB",
        "others": status.others.strip(),
        "elapsed": "" if status.elapsed is None else clock(status.elapsed),
        "left": "" if status.left is None else f"{clock(status.left)} left",
    }


def _bar(share: float, width: int, is_ascii: bool) -> Text:
    done = int(share * width)
    full, empty = ("#", "-") if is_ascii else ("━", "━")
    return Text.assemble((full * done, "magenta"), (empty * (width - done), "bright_black"))


def sparkline(values: Sequence[float], width: int) -> str:
    """Returns the values as at most `width` bars of eight heights, each the mean of neighboring
    values. Values that are not finite leave a gap."""
    if len(values) < 2:
        return ""
    num = min(width, len(values))
    edges = [round(i * len(values) / num) for i in range(num + 1)]
    means = [
        math.fsum(values[a:b]) / (b - a)
        if all(map(math.isfinite, values[a:b])) else math.nan
        for a, b in pairwise(edges)
    ]  # fmt: skip
    known = [mean for mean in means if math.isfinite(mean)]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    top = len(LEVELS) - 1
    return "".join(
        LEVELS[round((mean - low) / span * top) if span else 0] if math.isfinite(mean) else " "
        for mean in means
    )


def smoothed(losses: Sequence[float], weight: float = 0.9) -> float | None:
    """Returns an exponential moving average of the losses, with decay `weight`; if the last loss is
    not finite, returns that loss."""
    if not losses:
        return None
    if not math.isfinite(losses[-1]):
        return losses[-1]
    total = count = 0.0
    for loss in losses:
        if math.isfinite(loss):
            total, count = weight * total + loss, weight * count + 1.0
    return total / count
