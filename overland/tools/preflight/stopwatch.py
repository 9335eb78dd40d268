"""How long a piece of work takes, repeated for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

FEWEST = 5
MEDIAN: Callable[[list[float]], float] = median
"""For devices that are ours alone: one that throttles is slow most of the time."""
BEST: Callable[[list[float]], float] = min
"""For CPUs, which others use too: the fastest time is the one that was least disturbed."""


def seconds_each(
    work: Callable[[], object],
    settle: Callable[[], object],
    seconds: float,
    batch: int,
    choose: Callable[[list[float]], float],
) -> float:
    """Seconds of one `work`; `settle` waits until a device has done what it was given."""
    work()
    settle()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < FEWEST or time.perf_counter() < deadline:
        start = time.perf_counter()
        for _ in range(batch):
            work()
        settle()
        times.append((time.perf_counter() - start) / batch)
    return choose(times)
