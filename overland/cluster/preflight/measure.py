"""Measures a node by itself: its clock, versions, disks and network interfaces; and each of its
devices: what it is, how much of its memory is in use, whether a matrix product is correct, and how
fast products, memory and copies are.

A device must compute a matrix product correctly to the bit: devices of the same model with the same
libraries give the same bits, so one that differs is wrong. In case most are wrong, some rows are
also compared with float64 on the CPU.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import overland
from overland.cluster.wire import INTERFACES, Message, Wire, address_of_interface
from overland.errors import ClusterError
from overland.world.devices import DRIVERS, cpu_name

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

Stage = Callable[[str], None]
"""Called with the current stage of a measurement, which is named if it never ends."""

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

ROUND_TRIPS = 8  # the fastest one had the least delay, on the network or in a busy conductor
CLOCK_SECONDS = 5.0
MODULES = ("nvidia", "amdgpu")
MIB = 2**20


def measure_clock(wire: Wire) -> Message:
    """Returns the seconds ahead of the conductor, and the error bound of the fastest round trip."""
    best = (float("inf"), 0.0)
    for _ in range(ROUND_TRIPS):
        before = time.time()
        wire.send({"time": None})
        heard = wire.receive(CLOCK_SECONDS)
        after = time.time()
        if not heard or "time" not in heard[0]:
            return {"error": f"no reply from the conductor within {CLOCK_SECONDS:.0f} s"}
        best = min(best, (after - before, (before + after) / 2 - heard[0]["time"]))
    return {"ahead": best[1], "error_bound": best[0] / 2}


def measure_versions(config: str | None, with_torch: bool) -> dict[str, str]:
    """Returns versions by name. Importing torch takes seconds; without it, only its version."""
    found = {
        "overland": overland.__version__,
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "torch": _installed("torch"),
    }
    for name in MODULES:
        if (path := Path("/sys/module", name, "version")).exists():
            found[f"{name} driver"] = path.read_text().strip()
    if with_torch:
        found |= _libraries()
    if config is not None:
        found["config"] = _digest_of(Path(config))
    return found


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _libraries() -> dict[str, str]:
    import torch

    found = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    known = {name: str(version) for name, version in found.items() if version is not None}
    if known and torch.distributed.is_nccl_available():
        known["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {"torch": torch.__version__, **known}


def _digest_of(config: Path) -> str:
    """Returns a digest of the config: nodes with a stale view of a shared file system read another
    file under its name."""
    try:
        return _digest(config.read_bytes())
    except OSError as error:
        return f"unreadable ({error.strerror})"


def written_folders(run_folder: str) -> dict[str, Path]:
    """Returns the folders that a run writes to: its own, or its nearest existing parent, and the
    node's folder for temporary files, where kernels are cached."""
    run = Path(run_folder).expanduser().absolute()
    while not run.is_dir():
        run = run.parent
    return {"run folder": run, "temporary folder": Path(tempfile.gettempdir())}


def measure_disk(folder: Path, num_bytes: int) -> Message:
    """Measures a disk; an error is an answer too."""
    try:
        space = os.statvfs(folder)
        facts: Message = {"path": str(folder), "free_gib": space.f_bavail * space.f_frsize / 2**30}
        return {**facts, **_write_and_read(folder, num_bytes)}
    except OSError as error:
        return {"path": str(folder), "error": error.strerror or str(error)}


def _write_and_read(folder: Path, num_bytes: int) -> Message:
    """Writes and reads a file that is unlinked at once, so that nothing is ever left behind."""
    descriptor, name = tempfile.mkstemp(prefix=".overland-preflight-", dir=folder)
    try:
        os.unlink(name)
        content = os.urandom(num_bytes)
        start = time.perf_counter()
        written = 0
        while written < num_bytes:
            written += os.write(descriptor, content[written : written + 4 * MIB])
        os.fsync(descriptor)
        middle = time.perf_counter()
        if hasattr(os, "posix_fadvise"):  # otherwise it would be read from the page cache
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        parts = [os.pread(descriptor, 4 * MIB, at) for at in range(0, num_bytes, 4 * MIB)]
        end = time.perf_counter()
    finally:
        os.close(descriptor)
    return {
        "right": b"".join(parts) == content,
        "write_gb_per_s": num_bytes / (middle - start) / 1e9,
        "read_gb_per_s": num_bytes / (end - middle) / 1e9,
    }


def measure_interfaces(env: Mapping[str, str] = os.environ) -> Message:
    """Returns addresses by interface name, and a sentence for each interface that is missing or has
    none. Every name counts, since NCCL uses all that are listed."""
    addresses: dict[str, str] = {}
    problems: list[str] = []
    for variable in INTERFACES:
        words = env.get(variable, "")
        if words.startswith("^"):  # names interfaces to exclude; any other will do
            continue
        for name in filter(None, words.lstrip("=").split(",")):
            try:
                addresses[name] = address_of_interface(name, variable)
            except ClusterError as error:
                problems.append(str(error))
    return {"addresses": addresses, "problems": problems}


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
    return next((path for path in DRIVERS.values() if Path(path).exists()), "")


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
