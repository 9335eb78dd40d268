"""The devices of this machine, and the peak rates of known devices."""

from __future__ import annotations

import os
import socket
import sys
import tomllib
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

CONTEXT_BYTES = 2**30  # of a process on a GPU, besides its tensors
CPU_RANKS = 2  # without accelerators: enough to make every run distributed


def num_local_ranks(per_device: int = 1) -> int:
    """Returns the number of ranks: one per accelerator, or as many as share one, or a few on the
    CPU if there is none."""
    if not may_have_accelerator():
        return min(CPU_RANKS, os.cpu_count() or 1)
    import torch

    return torch.accelerator.device_count() * per_device or min(CPU_RANKS, os.cpu_count() or 1)


def may_have_accelerator() -> bool:
    """Returns whether it is worth importing torch, which takes seconds, to count devices."""
    drivers = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri", "/dev/dxg")
    return sys.platform == "darwin" or any(Path(path).exists() for path in drivers)


def device_type(wanted: str = "auto") -> str:
    """Returns `cuda` (NVIDIA and AMD alike) or `cpu`; `wanted` is `training.device`."""
    import torch

    return "cuda" if wanted == "auto" and torch.cuda.is_available() else "cpu"


def device_name(wanted: str = "auto") -> str:
    """Returns the accelerator's name as its driver gives it, or the CPU's."""
    import torch

    if device_type(wanted) == "cuda":
        return torch.cuda.get_device_name()
    return cpu_name()


def cpu_name() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "CPU"


def peak_flops(device: str, dtype: str = "bfloat16") -> float | None:
    """Returns the peak FLOP/s of the device with this name, or None if the table has no figure.

    float16 runs at the rate of bfloat16 on every listed device; the matrix units are not rated for
    float32, so it has no peak here and no MFU is reported.
    """
    rate = "bfloat16" if dtype == "float16" else dtype
    for entry in _known_devices():
        if any(word.lower() in device.lower() for word in entry["match"]):
            return entry[rate] * 1e12 if rate in entry else None
    return None


def device_memory(device: torch.device, ranks_per_device: int = 1) -> int:
    """Returns the bytes of a GPU that a rank may use: all, or its part if ranks share it, without
    what the driver and NCCL take for each of them."""
    import torch

    whole = int(torch.cuda.get_device_properties(device).total_memory)
    if ranks_per_device == 1:
        return whole
    return max(0, whole // ranks_per_device - CONTEXT_BYTES)


def device_identity(device: torch.device) -> str:
    """Returns words that no other GPU of any machine has."""
    import torch

    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def memory_in_use(wanted: str = "auto") -> float:
    """Returns the peak memory of this rank so far in GiB: of the device, or of the process on a
    CPU."""
    import torch

    if device_type(wanted) == "cuda":
        return torch.cuda.max_memory_reserved() / 2**30
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def machine_memory() -> float:
    """Returns the bytes of memory and swap that this job may use, within the limits of containers
    and Slurm; infinite if that is unknown."""
    swap, most = 0, [float("inf")]
    with suppress(OSError, KeyError, ValueError):
        amounts = _meminfo()
        swap = amounts["SwapTotal"]
        most.append(amounts["MemTotal"] + swap)
    for group in _control_groups():
        with suppress(OSError, ValueError):  # missing, or "max"
            most.append(int((group / "memory.max").read_text()) + swap)
    for group in _old_control_groups():
        with suppress(OSError, ValueError):
            most.append(int((group / "memory.limit_in_bytes").read_text()) + swap)
    for name, count in (("SLURM_MEM_PER_NODE", "1"), ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")):
        with suppress(ValueError):
            megabytes = int(os.environ.get(name, "0")) * int(os.environ.get(count, count))
            most += [megabytes * 2**20] if megabytes > 0 else []
    return min(most)


class MemoryState(NamedTuple):
    """Memory of this machine at one moment."""

    free: float
    kills: int | None
    """Processes that the kernel has killed for lack of memory so far, if it says."""


def memory_state() -> MemoryState:
    found = [line.split()[1] for line in _lines("/proc/vmstat") if line.startswith("oom_kill ")]
    return MemoryState(available_memory(), int(found[0]) if found else None)


def available_memory() -> float:
    """Returns the bytes that can be allocated without swapping, within the limits of containers and
    jobs."""
    free = [float("inf")]
    with suppress(OSError, KeyError, ValueError):
        free.append(_meminfo()["MemAvailable"])
    for group in _control_groups():
        with suppress(OSError, ValueError, KeyError):  # missing, or "max"
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            words = (group / "memory.stat").read_text().split()
            cached = int(dict(zip(words[::2], words[1::2], strict=True))["inactive_file"])
            free.append(limit - used + cached)
    for group in _old_control_groups():
        with suppress(OSError, ValueError, KeyError):
            limit = int((group / "memory.limit_in_bytes").read_text())
            used = int((group / "memory.usage_in_bytes").read_text())
            words = (group / "memory.stat").read_text().split()
            cached = int(dict(zip(words[::2], words[1::2], strict=True))["total_inactive_file"])
            free.append(limit - used + cached)
    return min(free)


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def _control_groups() -> list[Path]:
    """Returns this process's control group and its parents: each may set a limit."""
    root = Path("/sys/fs/cgroup")
    groups = [root]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                group = root / line[len("0::") :].lstrip("/")
                groups += [group, *(p for p in group.parents if root in p.parents)]
    return groups


def _old_control_groups() -> list[Path]:
    """The same for version 1 of control groups. In a container, the group may be mounted as the
    root."""
    root = Path("/sys/fs/cgroup/memory")
    groups = [root]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if "memory" in kinds.split(","):
                group = root / path.lstrip("/")
                groups += [group, *(p for p in group.parents if root in p.parents)]
    return groups


@cache
def _known_devices() -> list[dict[str, Any]]:
    text = files("overland.world").joinpath("hardware.toml").read_text()
    return tomllib.loads(text)["device"]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
