"""Reduces the points of a curve, either without losing spikes or to means."""

from __future__ import annotations

import math

import numpy as np

from overland.apps.report.lines import Numbers

BINS = (100, 15_000)  # steps
LEAST_BINS = (20, 4)  # if there would be fewer, bins are smaller


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
