"""Many ranges at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]


def spread(first: Array, count: Array) -> tuple[Array, Array]:
    """All of [first, first + count), range after range: the number of the range, and the value."""
    which = np.repeat(np.arange(len(first)), count)
    before = np.cumsum(count) - count
    return which, np.arange(len(which)) - before[which] + first[which]
