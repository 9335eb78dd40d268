"""Many ranges at once, and where equal values are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]


def spread(first: Array, count: Array) -> tuple[Array, Array]:
    """All of [first, first + count), range after range: the number of the range, and the value."""
    which = np.repeat(np.arange(len(first)), count)
    before = np.cumsum(count) - count
    return which, np.arange(len(which)) - before[which] + first[which]


def groups(values: Array) -> Iterator[tuple[int, Array]]:
    """Each value and the places where it is. Mostly there is one, which is found in no time."""
    if len(values) and (values == values[0]).all():
        yield int(values[0]), np.arange(len(values))
        return
    for value in np.unique(values).tolist():
        yield value, np.flatnonzero(values == value)
