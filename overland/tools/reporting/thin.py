"""Reduces the points of a curve, either without losing spikes or to means of bins."""

from __future__ import annotations

import math

import numpy as np

from overland.tools.reporting.lines import Numbers

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


def bin_sizes(last_step: float) -> tuple[int, int]:
    """Returns the two bin sizes whose means are shown: 100 and 15,000 steps, or smaller ones if the
    run is too short for them."""
    fine, coarse = (
        size if last_step >= size * least else rounded(last_step / least)
        for size, least in zip(BINS, LEAST_BINS, strict=True)
    )
    return fine, max(coarse, 2 * fine)


def rounded(wanted: float) -> int:
    """Rounds down to 1, 2, 5, 10, 20, 50, …"""
    if wanted < 1:
        return 1
    power = 10 ** math.floor(math.log10(wanted))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= wanted)


def binned(steps: Numbers, values: Numbers, size: int) -> tuple[Numbers, Numbers]:
    """Returns the mean step and the mean value of each bin of `size` steps."""
    if not len(steps):
        return steps, values
    number = ((steps - 1) // size).astype(np.int64)
    begins = np.flatnonzero(np.diff(number, prepend=-2))
    counts = np.diff(np.append(begins, len(steps)))
    return np.add.reduceat(steps, begins) / counts, np.add.reduceat(values, begins) / counts
