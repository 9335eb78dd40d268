"""Reads all of metrics.jsonl into columns of numbers, and the lines of undone steps, which are in
metrics.undone.jsonl: a million lines in seconds.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overland.run_folder import METRICS, UNDONE
from overland.training.history import RECENT, History, Tail, is_step

Numbers = npt.NDArray[np.float64]
Record = dict[str, Any]
MISSING = float("nan")
LARGEST_VALUE = 1e300
MOST_DIGITS = 15  # a step with more digits needs a closer look
NUMBER = re.compile(rb": (?:-?[0-9][-+.0-9eE]*|null|NaN|-?Infinity)(?=[,}])")
VALUE = rb": ([^,}]+)"  # a stricter one takes twice as long, and `table` checks them anyway


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

    def newest(self, most: int) -> list[Record]:
        """Returns the last records, without missing values."""
        found = []
        for row in range(max(0, len(self) - most), len(self)):
            numbers = {name: column[row] for name, column in self._columns.items()}
            known = {name: one for name, one in numbers.items() if one == one}
            found.append({"step": self._steps[row], **known})
        return found

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
            column.extend(map(_number, [record.get(name) for record in records]))
            added = np.array(column[before:])
            for place in np.flatnonzero(~np.isfinite(added)).tolist():
                value = records[place].get(name)
                if isinstance(value, float):
                    odd = self.odd.setdefault(name, [])
                    odd.append((records[place]["step"], value))

    def append_table(self, names: Sequence[str], table: Numbers) -> None:
        """Adds the rows of a table whose first column is the step; all values are finite or
        missing."""
        before = len(self)
        self._steps.extend(table[:, 0].astype(np.int64).tolist())
        columns = dict(zip(names, table.T, strict=True))
        for name in set(names[1:]) - self._columns.keys():
            self._columns[name] = array("d", [MISSING]) * before
        for name, column in self._columns.items():
            more = columns.get(name, np.full(len(table), MISSING))
            column.frombytes(np.ascontiguousarray(more).tobytes())

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
        self.version = 0
        """Increases whenever something new was read."""

    def read_on(
        self, progress: Callable[[float, float], object] = lambda done, total: None
    ) -> None:
        read = 0
        for lines, to_come, is_other in self._tail.chunks():
            if is_other:
                self.logged, self.held_out = MetricColumns(), {}
            if not self._take_alike(lines):
                self._take(parse(lines))
            self.version += 1
            read += sum(map(len, lines))
            progress(read, read + to_come)
        for lines, _, is_other in self._undone_tail.chunks():
            if is_other:
                self.lost = MetricColumns()
            self.lost.append([record for record in parse(lines) if "loss" in record])
            self.version += 1

    def _take_alike(self, lines: Sequence[bytes]) -> bool:
        """Takes lines with the same names in the same order, as nearly all have, without parsing
        each one, in a third of the time. Returns False and takes nothing if that is impossible."""
        form = next((form for line in lines[:8] if (form := Form.of(line)) is not None), None)
        if form is None:
            return False
        rows, others = [], []
        for line in lines:
            if (row := form.values(line)) is not None:
                if not row[0].isdigit() or len(row[0]) > MOST_DIGITS:
                    return False
                rows.append(row)
            elif (record := _record(_parse_line(line))) is not None:
                others.append(record)
        table = form.table(rows)
        if table is None or any("loss" in one for one in others):
            return False
        if not (np.diff(table[:, 0], prepend=self.logged.last_step) > 0).all():
            return False
        self.logged.append_table(form.names, table)
        self._take(others)
        return True

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


class Recent(History):
    """The newest lines, for callers that need no more, so that the file is not read twice."""

    def __init__(self, lines: Lines) -> None:
        self._all = lines
        self._clear()

    def read_on(self) -> None:
        self._clear()
        self.recent.extend(self._all.logged.newest(RECENT))


class Form:
    """The names of a line's numbers, and a pattern for lines that differ only in the numbers."""

    def __init__(self, names: list[str], pattern: bytes) -> None:
        self.names = names
        self._match = re.compile(pattern).fullmatch

    @classmethod
    def of(cls, line: bytes) -> Form | None:
        """Returns None for a line that is not about a step, or has more than numbers."""
        record = _record(_parse_line(line))
        if record is None or "loss" not in record or not line.startswith(b'{"step": '):
            return None
        parts = NUMBER.split(line)
        pattern = VALUE.join(map(re.escape, parts))
        return cls(list(record), pattern) if len(parts) == len(record) + 1 else None

    def values(self, line: bytes) -> tuple[bytes, ...] | None:
        found = self._match(line)
        return found.groups() if found is not None else None

    def table(self, rows: list[tuple[bytes, ...]]) -> Numbers | None:
        """Returns None if a value is not a number or not finite."""
        text = b",".join([b",".join(row) for row in rows]).replace(b"null", b"nan")
        if not rows or b"N" in text or b"I" in text:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the size shows any error
            flat = np.fromstring(text, sep=",")
        return flat.reshape(len(rows), -1) if flat.size == len(rows) * len(self.names) else None


def parse(lines: Iterable[bytes]) -> list[Record]:
    """Returns the records of complete lines; anything else is skipped."""
    lines = [line for line in lines if line]
    try:  # parsing all lines at once takes half the time
        values = json.loads(b"[" + b",".join(lines) + b"]")
        values = values if len(values) == len(lines) else list(map(_parse_line, lines))
    except (ValueError, RecursionError):
        values = list(map(_parse_line, lines))
    return [record for value in values if (record := _record(value)) is not None]


def _parse_line(line: bytes) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(line)
    return None  # truncated by a kill or a full disk


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
