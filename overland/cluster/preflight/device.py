"""Measures one device: what it is, how much of its memory is in use, whether a matrix product is
correct, and how fast products, memory and copies are.

It must compute a matrix product correctly to the bit: devices of the same model with the same
libraries give the same bits, so one that differs is wrong. In case most are wrong, some rows are
also compared with float64 on the CPU.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from overland.cluster.wire import Message
from overland.world.devices import cpu_name

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

Stage = Callable[[str], None]
"""Called with the current stage of a measurement, which is named if it never ends."""

DRIVERS = ("/dev/nvidiactl", "/dev/kfd")
SEED = 20
CHECKED_ROWS = 32
# Both in units of an element's standard deviation, √n. Measured for n from 256 to 2048: the final
# rounding to bfloat16 is off by at most 2 steps; sums in float32 by at most 24.
ROUNDING = 8.0
SUMMING = 100.0 * 2**-23
FEWEST = 5  # timed runs
MEDIAN: Callable[[list[float]], float] = median
"""For devices that only we use: a throttled device is slow most of the time."""
BEST: Callable[[list[float]], float] = min
"""For CPUs, which others use too: the fastest time is the least disturbed."""


@dataclass(frozen=True)
class Sizes:
    side: int
    memory_bytes: int
    batch: int
    """Runs between two synchronizations: a single run would measure the synchronization."""
    seconds: float
    choose: Callable[[list[float]], float]


# 4096: every compute unit has work, and the inputs take half a second to create. Half a second per
# test reveals a device that throttles, and keeps the whole within seconds.
ACCELERATOR = Sizes(side=4096, memory_bytes=2**30, batch=10, seconds=0.5, choose=MEDIAN)
HOST_BYTES = 2**28
# 256: under a millisecond, so that at least one of many runs is not interrupted.
CPU = Sizes(side=256, memory_bytes=2**25, batch=1, seconds=0.2, choose=BEST)


def measure_device(local_rank: int, stage: Stage) -> Message:
    """Measures the device that this task would have in training."""
    import torch

    stage("finding the device")
    if not torch.cuda.is_available():
        return {**measure_cpu(stage), "driver": driver()}
    visible = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % visible)
    torch.cuda.set_device(device)
    stage("the matmul")
    facts = {"kind": "cuda", **identity(device, visible), **measure_matmul(device)}
    stage("the test of memory")
    facts |= measure_memory(device)
    stage("copies between host and device")
    return {**facts, **measure_copies(device)}


def measure_cpu(stage: Stage) -> Message:
    import numpy as np

    stage("the matmul")
    a, b = factors(CPU.side)
    first = np.matmul(a, b)
    each = seconds_each(lambda: np.matmul(a, b), CPU)
    last = np.matmul(a, b)
    stage("the test of memory")
    source = np.ones(CPU.memory_bytes, dtype=np.uint8)
    target = np.empty_like(source)
    copy = seconds_each(lambda: np.copyto(target, source), CPU)
    return {
        "kind": "cpu",
        "name": cpu_name(),
        "matmul_digest": _digest(first.tobytes()),
        "matmul_is_steady": first.tobytes() == last.tobytes(),
        "matmul_is_near": is_near(first, a, b, float(np.finfo(np.float32).eps)),
        "matmul_tflops": 2 * CPU.side**3 / each / 1e12,
        "memory_gb_per_s": 2 * CPU.memory_bytes / copy / 1e9,
    }


def driver() -> str:
    """Returns the driver of an accelerator that torch can use, or ""; plain graphics cards do not
    count."""
    return next((path for path in DRIVERS if Path(path).exists()), "")


def identity(device: torch.device, visible: int) -> Message:
    """Returns what the device is, and how much of its memory is already in use."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "visible": visible,
        "identity": identity_of(properties),
        "memory_gib": total / 2**30,
        "in_use_gib": (total - free) / 2**30,
    }


def identity_of(properties: object) -> str:
    """Returns an identity that two tasks share only if they have the same device; "" if devices
    cannot be distinguished. A driver may leave the UUID at zero, and partitions of a device may
    share its slot."""
    uuid = str(getattr(properties, "uuid", ""))
    slot = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    known = [uuid if uuid.strip("0-") else "", "" if None in slot else ":".join(map(str, slot))]
    return " ".join(filter(None, known))


def measure_matmul(device: torch.device) -> Message:
    import torch

    a, b = (torch.from_numpy(one).to(torch.bfloat16) for one in factors(ACCELERATOR.side))
    on_device = a.to(device), b.to(device)
    out = torch.empty_like(on_device[0])
    first = torch.matmul(*on_device).cpu()
    work = lambda: torch.matmul(*on_device, out=out)
    each = seconds_each(work, ACCELERATOR, settler(device))
    last = torch.matmul(*on_device).cpu()
    content = first.view(torch.uint8).numpy().tobytes()
    found, left, right = (tensor.float().numpy() for tensor in (first, a, b))
    return {
        "matmul_digest": _digest(content),
        "matmul_is_steady": content == last.view(torch.uint8).numpy().tobytes(),
        "matmul_is_near": is_near(found, left, right, torch.finfo(torch.bfloat16).eps),
        "matmul_tflops": 2 * ACCELERATOR.side**3 / each / 1e12,
    }


def measure_memory(device: torch.device) -> Message:
    """Measures a copy in device memory; read and written bytes both count."""
    import torch

    source = torch.ones(ACCELERATOR.memory_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    each = seconds_each(lambda: target.copy_(source), ACCELERATOR, settler(device))
    return {"memory_gb_per_s": 2 * ACCELERATOR.memory_bytes / each / 1e9}


def measure_copies(device: torch.device) -> Message:
    """Measures copies between pinned memory and the device, both ways."""
    import torch

    here = torch.ones(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(HOST_BYTES, dtype=torch.uint8, device=device)
    settle = settler(device)
    up = seconds_each(lambda: there.copy_(here, non_blocking=True), ACCELERATOR, settle)
    down = seconds_each(lambda: here.copy_(there, non_blocking=True), ACCELERATOR, settle)
    return {
        "to_device_gb_per_s": HOST_BYTES / up / 1e9,
        "to_host_gb_per_s": HOST_BYTES / down / 1e9,
    }


def factors(n: int) -> tuple[Array, Array]:
    """Returns two random matrices from a fixed seed, created on the CPU: the same on every node."""
    import numpy as np

    random = np.random.default_rng(SEED)
    return (
        random.standard_normal((n, n), dtype=np.float32),
        random.standard_normal((n, n), dtype=np.float32),
    )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def is_near(product: Array, a: Array, b: Array, precision: float) -> bool:
    """Compares some rows, spread over the matrix, with float64. NaN is not near."""
    import numpy as np

    n = len(a)
    rows = np.arange(0, n, max(1, n // CHECKED_ROWS))
    exact = np.dot(a[rows].astype(np.float64), b.astype(np.float64))
    error = np.abs(product[rows].astype(np.float64) - exact).max()
    return bool(error <= (ROUNDING * precision + SUMMING) * n**0.5)


def seconds_each(
    work: Callable[[], object], sizes: Sizes, settle: Callable[[], object] = lambda: None
) -> float:
    """Returns the seconds of one `work`; `settle` waits until the device has finished."""
    work()
    settle()
    times: list[float] = []
    deadline = time.perf_counter() + sizes.seconds
    while len(times) < FEWEST or time.perf_counter() < deadline:
        start = time.perf_counter()
        for _ in range(sizes.batch):
            work()
        settle()
        times.append((time.perf_counter() - start) / sizes.batch)
    return sizes.choose(times)


def settler(device: torch.device) -> Callable[[], None]:
    """Returns what waits until a device has finished."""
    import torch

    return (lambda: None) if device.type == "cpu" else partial(torch.cuda.synchronize, device)
