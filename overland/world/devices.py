"""What this machine computes on."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

CPU_RANKS = 2  # on a machine without accelerators: enough that every run is really distributed


def num_local_ranks() -> int:
    """One rank per accelerator; without any, a few on the CPU."""
    if not may_have_accelerator():
        return min(CPU_RANKS, os.cpu_count() or 1)
    import torch

    return torch.accelerator.device_count() or min(CPU_RANKS, os.cpu_count() or 1)


def may_have_accelerator() -> bool:
    """Whether it is worth importing torch (seconds) to count devices."""
    drivers = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri", "/dev/dxg")
    return sys.platform == "darwin" or any(Path(path).exists() for path in drivers)


def device_type() -> str:
    """`cuda` (NVIDIA and AMD alike) or `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    """The accelerator's name as its driver gives it, or the CPU's."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return cpu_name()


def cpu_name() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "CPU"


def memory_in_use() -> float:
    """Peak memory of this rank so far, GiB: the device's, or the process's on a CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / 2**30
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def available_memory() -> float:
    """Bytes that can be had without swapping; the limits of containers and jobs count."""
    free = [float("inf")]
    with suppress(OSError, KeyError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        amounts = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        free.append(amounts["MemAvailable"])
    for group in _control_groups():
        with suppress(OSError, ValueError, KeyError):  # not there, or "max"
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            words = (group / "memory.stat").read_text().split()
            cached = int(dict(zip(words[::2], words[1::2], strict=True))["inactive_file"])
            free.append(limit - used + cached)
    return min(free)


def _control_groups() -> list[Path]:
    """This process's group and those around it: each may set a limit."""
    root = Path("/sys/fs/cgroup")
    groups = [root]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                group = root / line[len("0::") :].lstrip("/")
                groups += [group, *(p for p in group.parents if root in p.parents)]
    return groups
