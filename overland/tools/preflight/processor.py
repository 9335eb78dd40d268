"""A CPU without torch, for `--quick`: the twin of `device.py` in numpy."""

from __future__ import annotations

from overland.tools.preflight import product, stopwatch
from overland.tools.preflight.child import Stage
from overland.world.devices import cpu_name
from overland.world.wire import Message

SIDE = 256  # under a millisecond, so that some of many runs is not interrupted
MEMORY_BYTES = 32 * 2**20
SECONDS = 0.2


def measure(stage: Stage) -> Message:
    import numpy as np

    stage("the matmul")
    a, b = product.factors(SIDE)
    first = np.matmul(a, b)
    each = stopwatch.seconds_each(
        lambda: np.matmul(a, b), lambda: None, SECONDS, batch=1, choose=stopwatch.BEST
    )
    last = np.matmul(a, b)
    stage("the test of memory")
    source = np.ones(MEMORY_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    copy = stopwatch.seconds_each(
        lambda: np.copyto(target, source), lambda: None, SECONDS, batch=1, choose=stopwatch.BEST
    )
    return {
        "kind": "cpu",
        "name": cpu_name(),
        "matmul_digest": product.digest(first.tobytes()),
        "matmul_is_steady": first.tobytes() == last.tobytes(),
        "matmul_is_near": product.is_near(first, a, b, float(np.finfo(np.float32).eps)),
        "matmul_tflops": 2 * SIDE**3 / each / 1e12,
        "memory_gb_per_s": 2 * MEMORY_BYTES / copy / 1e9,
    }
