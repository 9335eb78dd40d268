"""One device, through torch: what it is, whether it is idle, right and fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overland.tools.preflight import product, stopwatch
from overland.tools.preflight.child import Stage
from overland.world.devices import device_name
from overland.world.wire import Message

if TYPE_CHECKING:
    import torch


DRIVERS = ("/dev/nvidiactl", "/dev/kfd")


@dataclass(frozen=True)
class Sizes:
    side: int
    memory_bytes: int
    host_bytes: int
    batch: int
    """Runs between two waits for the device: one alone would measure the wait."""
    seconds: float


# 4096: every compute unit has work, and the inputs are made in half a second. Half a second of each
# shows a device that throttles, and leaves the whole in seconds.
ACCELERATOR = Sizes(side=4096, memory_bytes=2**30, host_bytes=2**28, batch=10, seconds=0.5)
CPU = Sizes(side=256, memory_bytes=2**25, host_bytes=0, batch=1, seconds=0.2)


def measure(local_rank: int, stage: Stage) -> Message:
    """Of the device that training would give to this task."""
    import torch

    stage("finding the device")
    if not torch.cuda.is_available():
        device = torch.device("cpu")
        facts: Message = {"kind": "cpu", "name": device_name(), "driver": driver()}
        return {**facts, **rates(device, CPU, stage)}
    visible = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % visible)
    torch.cuda.set_device(device)
    return {"kind": "cuda", **identity(device, visible), **rates(device, ACCELERATOR, stage)}


def driver() -> str:
    """Of accelerators that torch computes on; graphics cards for a screen are none."""
    return next((path for path in DRIVERS if Path(path).exists()), "")


def identity(device: torch.device, visible: int) -> Message:
    """What it is, and how much of it is taken before we begin."""
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
    """Two tasks that were given the same device show the same; empty if nothing tells devices
    apart. A driver may leave the UUID at zero, and parts of a device may share its slot."""
    uuid = str(getattr(properties, "uuid", ""))
    slot = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    known = [uuid if uuid.strip("0-") else "", "" if None in slot else ":".join(map(str, slot))]
    return " ".join(filter(None, known))


def rates(device: torch.device, sizes: Sizes, stage: Stage) -> Message:
    stage("the matmul")
    facts = matmul(device, sizes)
    stage("the test of memory")
    facts |= memory(device, sizes)
    if device.type != "cpu":
        stage("copies between host and device")
        facts |= host(device, sizes)
    return facts


def matmul(device: torch.device, sizes: Sizes) -> Message:
    import torch

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a, b = (torch.from_numpy(factor).to(dtype) for factor in product.factors(sizes.side))
    on_device = a.to(device), b.to(device)
    out = torch.empty(sizes.side, sizes.side, dtype=dtype, device=device)
    first = torch.matmul(*on_device).cpu()
    each = _seconds_each(lambda: torch.matmul(*on_device, out=out), device, sizes)
    last = torch.matmul(*on_device).cpu()
    content = first.view(torch.uint8).numpy().tobytes()
    found, left, right = (tensor.float().numpy() for tensor in (first, a, b))
    return {
        "matmul_digest": product.digest(content),
        "matmul_is_steady": content == last.view(torch.uint8).numpy().tobytes(),
        "matmul_is_near": product.is_near(found, left, right, torch.finfo(dtype).eps),
        "matmul_tflops": 2 * sizes.side**3 / each / 1e12,
    }


def memory(device: torch.device, sizes: Sizes) -> Message:
    """Read and written bytes of a copy."""
    import torch

    source = torch.ones(sizes.memory_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    each = _seconds_each(lambda: target.copy_(source), device, sizes)
    return {"memory_gb_per_s": 2 * sizes.memory_bytes / each / 1e9}


def host(device: torch.device, sizes: Sizes) -> Message:
    """Between pinned memory and the device, both ways."""
    import torch

    here = torch.ones(sizes.host_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(sizes.host_bytes, dtype=torch.uint8, device=device)
    up = _seconds_each(lambda: there.copy_(here, non_blocking=True), device, sizes)
    down = _seconds_each(lambda: here.copy_(there, non_blocking=True), device, sizes)
    return {
        "to_device_gb_per_s": sizes.host_bytes / up / 1e9,
        "to_host_gb_per_s": sizes.host_bytes / down / 1e9,
    }


def _seconds_each(work: Callable[[], object], device: torch.device, sizes: Sizes) -> float:
    import torch

    is_cpu = device.type == "cpu"
    return stopwatch.seconds_each(
        work,
        (lambda: None) if is_cpu else (lambda: torch.cuda.synchronize(device)),
        sizes.seconds,
        sizes.batch,
        stopwatch.BEST if is_cpu else stopwatch.MEDIAN,
    )
