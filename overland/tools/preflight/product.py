"""A matrix product that every device must get right, to the bit.

Devices of one model with the same libraries give the same bits, so one that differs from the others
is wrong. Should most be wrong, some rows are also compared with float64, computed by the CPU.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

SEED = 20
CHECKED_ROWS = 32
# Both in units of an element's standard deviation, √n. Measured for n from 256 to 2048: the last
# rounding of bfloat16 is at most 2 of its steps off; sums in float32 at most 24 of theirs.
ROUNDING = 8.0
SUMMING = 100.0 * 2**-23


def factors(n: int) -> tuple[Array, Array]:
    """From one seed, on the CPU: the same numbers on every node."""
    import numpy as np

    random = np.random.default_rng(SEED)
    return (
        random.standard_normal((n, n), dtype=np.float32),
        random.standard_normal((n, n), dtype=np.float32),
    )


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def is_near(product: Array, a: Array, b: Array, precision: float) -> bool:
    """Against float64, in rows that are spread over the whole. Written so that nan is not near."""
    import numpy as np

    n = len(a)
    rows = np.arange(0, n, max(1, n // CHECKED_ROWS))
    exact = np.dot(a[rows].astype(np.float64), b.astype(np.float64))
    error = np.abs(product[rows].astype(np.float64) - exact).max()
    return bool(error <= (ROUNDING * precision + SUMMING) * n**0.5)
