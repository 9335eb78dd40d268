"""The progress of long work other than training, on stderr: a bar if it is a terminal, otherwise a
line now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

Unit = Literal["things", "bytes", "share"]
LINE_SECONDS = 10.0  # between lines


class Bar:
    """Wraps a bar of rich, or draws nothing without one. Any thread may update it."""

    def __init__(self, drawn: Any = None, task: Any = None) -> None:
        self._drawn, self._task = drawn, task

    @property
    def is_drawn(self) -> bool:
        return self._drawn is not None

    def __call__(self, done: float, total: float | None = None, what: str | None = None) -> None:
        """Sets how much is done, of how much in total, and what is being done."""
        if self._drawn is not None:
            self._drawn.update(self._task, completed=done, total=total, description=what)

    def advance(self, more: float) -> None:
        if self._drawn is not None:
            self._drawn.advance(self._task, more)


class Lines(Bar):
    """Prints what is being done, and how much of it is done, at most every `LINE_SECONDS`."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self._unit, self._last = unit, time.monotonic()

    def __call__(self, done: float, total: float | None = None, what: str | None = None) -> None:
        if time.monotonic() - self._last < LINE_SECONDS:
            return
        self._last = time.monotonic()
        if self._unit == "bytes" and total:
            what = f"{what}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB"
        print(what, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(
    what: str,
    unit: Unit = "things",
    total: float | None = None,
    visible: bool = True,
    lines: bool = False,
) -> Iterator[Bar]:
    """Yields a bar with counts in that unit, the remaining time, and what is being done. With
    `lines`, prints these if there is no terminal."""
    if not visible or not sys.stderr.isatty():
        yield Lines(unit) if visible and lines else Bar()
        return
    from rich import progress

    from overland.apps.streams import SafeConsole

    counts: dict[Unit, list[Any]] = {
        "things": [progress.MofNCompleteColumn(), progress.TimeRemainingColumn()],
        "bytes": [progress.DownloadColumn(), progress.TimeRemainingColumn()],
        "share": [progress.TaskProgressColumn()],
    }
    what_column = progress.TextColumn("{task.description}", markup=False)
    columns = (progress.BarColumn(), *counts[unit], what_column)
    with progress.Progress(*columns, console=SafeConsole(stderr=True), transient=True) as drawn:
        yield Bar(drawn, drawn.add_task(what, total=total))
