"""Reads all of metrics.jsonl into columns of numbers, and the lines of undone steps, which are in
metrics.undone.jsonl; and reduces the points of a curve, either without losing spikes or to means.
"""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overland.apps.watch.files import object_in
from overland.apps.watch.history import is_step
from overland.cluster.supervise.events import Tail
from overland.run_folder import METRICS, UNDONE

Numbers = npt.NDArray[np.float64]
Record = dict[str, Any]
MISSING = float("nan")
LARGEST_VALUE = 1e300
BINS = (100, 15_000)  # steps
LEAST_BINS = (20, 4)  # if there would be fewer, bins are smaller


class MetricColumns:
    """Numbers by name, with one row per record. Steps increase, unless records were only
    appended."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self.odd: dict[str, list[tuple[int, float]]] = {}
        """Logged values that are not finite."""

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def last_step(self) -> int:
        return self._steps[-1] if self._steps else -1

    @property
    def steps(self) -> Numbers:
        return np.array(self._steps, np.float64)

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def __getitem__(self, name: str) -> Numbers:
        """Returns a column, with NaN where a record has no such number."""
        if name not in self._columns:
            return np.full(len(self), MISSING)
        return np.array(self._columns[name], np.float64)

    def points(self, name: str) -> tuple[Numbers, Numbers]:
        """Returns steps and values, without those that are not finite or too large to sum."""
        values = self[name]
        known = np.abs(values) < LARGEST_VALUE
        return self.steps[known], values[known]

    def not_finite_since(self, name: str) -> int | None:
        """Returns the first step of the NaN or infinite values at the end, if there are any."""
        odd = [step for step, _ in self.odd.get(name, [])]
        if not odd or odd[-1] != self.last_step:
            return None
        finite = self.points(name)[0]
        return next(step for step in odd if not len(finite) or step > finite[-1])

    def merge(self, records: Iterable[Record]) -> None:
        """Adds records by step; where a step occurs twice, the later record counts."""
        by_step = {record["step"]: record for record in records}
        self._cut(min(by_step, default=self.last_step + 1))
        self.append([by_step[step] for step in sorted(by_step)])

    def append(self, records: Sequence[Record]) -> None:
        before = len(self)
        self._steps.extend(record["step"] for record in records)
        names = {name for record in records for name in record if name != "step"}
        for name in sorted(names - self._columns.keys()):
            self._columns[name] = array("d", [MISSING]) * before
        for name, column in self._columns.items():
            values: list[Any] = [record.get(name) for record in records]
            try:  # a whole column at once, as is possible for nearly all
                column += array("d", values)
            except (TypeError, OverflowError):
                column.extend(map(_number, values))
            added = np.array(column[before:])
            for place in np.flatnonzero(~np.isfinite(added)).tolist():
                value = records[place].get(name)
                if isinstance(value, float):
                    odd = self.odd.setdefault(name, [])
                    odd.append((records[place]["step"], value))

    def _cut(self, step: int) -> None:
        """Removes the records from `step` on."""
        place = bisect_left(self._steps, step)
        del self._steps[place:]
        for column in self._columns.values():
            del column[place:]
        self.odd = {name: [one for one in odd if one[0] < step] for name, odd in self.odd.items()}


class Lines:
    """What a run has logged, read incrementally as it grows."""

    def __init__(self, run: Path) -> None:
        self._tail, self._undone_tail = Tail(run / METRICS), Tail(run / UNDONE)
        self.logged, self.lost = MetricColumns(), MetricColumns()
        """Steps that count, and undone ones in the order in which they were logged."""
        self.held_out: dict[str, MetricColumns] = {}

    def read_on(
        self, progress: Callable[[float, float], object] = lambda done, total: None
    ) -> None:
        read = 0
        for lines, to_come, is_other in self._tail.chunks():
            if is_other:
                self.logged, self.held_out = MetricColumns(), {}
            self._take(parse(lines))
            read += sum(map(len, lines))
            progress(read, read + to_come)
        for lines, _, is_other in self._undone_tail.chunks():
            if is_other:
                self.lost = MetricColumns()
            self.lost.append([record for record in parse(lines) if "loss" in record])

    def _take(self, records: Iterable[Record]) -> None:
        logged = []
        for record in records:
            if "loss" in record:
                logged.append(record)
                continue
            for name, value in record.items():
                if name not in ("step", "time") and not name.startswith("seconds/"):
                    point = {"step": record["step"], "value": value, "time": record.get("time")}
                    self.held_out.setdefault(name, MetricColumns()).merge([point])
        self.logged.merge(logged)


def parse(lines: Iterable[bytes]) -> list[Record]:
    """Returns the records of complete lines; anything else is skipped."""
    lines = [line for line in lines if line]
    try:  # parsing all lines at once takes half the time
        values = json.loads(b"[" + b",".join(lines) + b"]")
        values = values if len(values) == len(lines) else list(map(object_in, lines))
    except (ValueError, RecursionError):
        values = list(map(object_in, lines))
    return [record for value in values if (record := _record(value)) is not None]


def _record(value: Any) -> Record | None:
    """Returns a line's numbers by name; numbers inside a table get both names."""
    if not isinstance(value, dict) or not is_step(value.get("step")):
        return None
    if not any(isinstance(one, dict) for one in value.values()):
        return value
    record: Record = {}
    for name, one in value.items():
        if isinstance(one, dict):
            record.update({f"{name}/{inner}": number for inner, number in one.items()})
        else:
            record[name] = one
    return record


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value) if abs(value) < 1 << 1000 else math.inf
    return MISSING


def thinned(steps: Numbers, values: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """Returns about `most` points (at most two more): the lowest and the highest of equal ranges of
    steps, and the first and last point. All values must be finite."""
    if len(steps) <= most:
        return steps, values
    num = max(1, most // 2)
    span = steps[-1] - steps[0] + 1
    bucket = ((steps - steps[0]) * (num / span)).astype(np.int64)
    order = np.lexsort((values, bucket))
    begins = np.flatnonzero(np.diff(bucket[order], prepend=-1))
    ends = np.append(begins[1:], len(order)) - 1
    kept = np.unique(np.concatenate([order[begins], order[ends], [0, len(steps) - 1]]))
    return steps[kept], values[kept]


def bin_sizes(last_step: float, spacing: float = 1.0) -> tuple[int, int]:
    """Returns the two numbers of steps whose means are shown: 100 and 15,000, or fewer if the run
    is too short for them. 1: none, because values are logged too rarely for a mean (`spacing` is
    the usual number of steps from one to the next)."""
    fine, coarse = (
        size if last_step >= size * least else rounded(last_step / least)
        for size, least in zip(BINS, LEAST_BINS, strict=True)
    )
    coarse = max(coarse, 2 * fine)
    least = max(2, 2 * spacing)
    return (
        fine if fine >= least else 1,
        coarse if least <= coarse <= last_step / 2 else 1,
    )


def spacing_of(steps: Numbers) -> float:
    """Returns the usual number of steps between two that were logged."""
    return float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0


def rounded(wanted: float) -> int:
    """Rounds down to 1, 2, 5, 10, 20, 50, …"""
    if wanted < 1:
        return 1
    power = 10 ** math.floor(math.log10(wanted))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= wanted)


def means(steps: Numbers, values: Numbers, size: int) -> tuple[Numbers, Numbers]:
    """Returns the mean of the values in the last `size` steps, at every `size` steps and at the
    last one."""
    if not len(steps):
        return steps, values
    number = ((steps - 1) // size).astype(np.int64)
    ends = np.flatnonzero(np.diff(number, append=-1))
    begins = np.searchsorted(steps, steps[ends] - size, side="right")
    # Each range is summed separately: one spike of 1e18 would round all later sums of a total.
    ranges = np.column_stack([begins, ends + 1]).ravel()
    sums = np.add.reduceat(np.append(values, 0.0), ranges)[::2]
    return steps[ends], sums / (ends + 1 - begins)
