"""Reads metrics.jsonl: losses by step, the newest numbers, and the pace (with it the time
left)."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from overland.apps.watch.files import object_in
from overland.cluster.supervise.events import Tail

Record = dict[str, Any]
"""A line of metrics.jsonl."""
T = TypeVar("T")
Points = list[tuple[int, float]]

HELD_OUT = "validation_loss/"
LARGEST_STEP = 2**53

# A file of a million lines (300 MB) is sampled down to 30,000, except for its end and held-out
# losses: parsing all of it would take seconds, and a terminal has 200 dots in a row.
WHOLE_BYTES = 10 << 20
END_BYTES = 1 << 20
RECENT = 100  # records that the pace is computed from
PAUSE = 20  # times the median: a gap this long is a restart and does not count


class History:
    """Follows the file. When a run goes back to an earlier step, the lines after that step are
    removed, and the file is another one."""

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        """`last_bytes`: read only this much of the end of the file, where the newest lines are."""
        self._tail = Tail(path, last_bytes)
        self._clear()

    def _clear(self) -> None:
        self.losses: Points = []
        self.held_out: dict[str, Points] = {}
        self.recent: deque[Record] = deque(maxlen=RECENT)

    def read_on(self) -> None:
        every, mark = 1, HELD_OUT.encode()
        for lines, to_come, is_other in self._tail.chunks():
            if is_other:
                self._clear()
                every = 1 + to_come // WHOLE_BYTES
            elif to_come < END_BYTES:
                every = 1
            for number, line in enumerate(lines):
                if number % every == 0 or mark in line:
                    with suppress(OverflowError):  # an integer of hundreds of digits
                        self._take(object_in(line))

    def _take(self, line: Record) -> None:
        step = line.get("step", -1)
        if not is_step(step):  # cut short by a kill or a full disk
            return
        record = {name: value for name, value in line.items() if _is_number(name, value)}
        if "loss" in record:
            self.losses.append((step, float(record["loss"])))
            self.recent.append(record)
        for name, value in record.items():
            if name.startswith(HELD_OUT):
                points = self.held_out.setdefault(name.removeprefix(HELD_OUT), [])
                points.append((step, float(value)))

    @property
    def newest(self) -> Record:
        return self.recent[-1] if self.recent else {}

    @property
    def step_seconds(self) -> float | None:
        """The median time of recent steps."""
        return statistics.median(paces) if (paces := self._paces()) else None

    @property
    def pace(self) -> float | None:
        """The mean seconds from step to step, including saves and validation but not restarts."""
        seconds = self.step_seconds
        if seconds is None:
            return None
        paces = [one for one in self._paces() if one <= PAUSE * seconds]
        return statistics.fmean(paces) if paces else None

    def _paces(self) -> list[float]:
        timed = [(one["step"], one["time"]) for one in self.recent if "time" in one]
        steps = [(step - s, t - u) for (s, u), (step, t) in pairwise(timed)]
        return [seconds / num for num, seconds in steps if num > 0 and seconds >= 0]


def _is_number(name: str, value: Any) -> bool:
    """Whether a value is usable. A loss may be infinite or NaN, a time may not."""
    return isinstance(value, int | float) and (name != "time" or math.isfinite(value))


def is_step(value: Any) -> bool:
    """Whether a value can be the number of a step; in a damaged file it may be anything."""
    return type(value) is int and 0 <= value < LARGEST_STEP


def thinned(points: Sequence[T], most: int) -> list[T]:
    """Returns at most `most` points, plus the last one, which is always kept."""
    every = -(-len(points) // most)
    return [*points[:-1:every], points[-1]] if points else []
