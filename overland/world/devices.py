"""The devices of this machine: how many ranks they take, the peak rates of known ones, the memory
that a rank or job may use, and GPUs that ranks share.

Several ranks may share a GPU, to try a layout of eight where there is one. NCCL refuses two ranks
on one device of a host, so every rank is a host of its own to NCCL, which then sends through
sockets: losses, saves and failures are those of real devices, speed is not.
"""

from __future__ import annotations

import os
import socket
import sys
import tomllib
from collections.abc import MutableMapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from overland.errors import TrainingError
from overland.world import World

if TYPE_CHECKING:
    import torch

CONTEXT_BYTES = 2**30  # of a process on a GPU, besides its tensors
RANKS_PER_DEVICE = "comm.ranks_per_device"
DRIVERS = {"nvidia": "/dev/nvidiactl", "amd": "/dev/kfd"}  # of accelerators that torch can use
CPU_RANKS = 2  # without accelerators: enough to make every run distributed


def num_local_ranks(per_device: int = 1, on_cpu: int = CPU_RANKS) -> int:
    """Returns the number of ranks: one per accelerator, or as many as share one, or a few on the
    CPU if there is none."""
    count = 0
    if may_have_accelerator():
        import torch

        count = torch.accelerator.device_count() * per_device
    return count or min(on_cpu, os.cpu_count() or 1)


def may_have_accelerator() -> bool:
    """Returns whether it is worth importing torch, which takes seconds, to count devices."""
    drivers = (*DRIVERS.values(), "/dev/dri", "/dev/dxg")
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


def devices_in_words(world: World, wanted: str, ranks_per_device: int) -> str:
    """Returns, for example, "4 × NVIDIA H200", or "4 ranks on 1 × NVIDIA H200"."""
    number = num_devices(world.size, wanted, ranks_per_device)
    ranks = f"{world.size:,} ranks on " if number < world.size else ""
    return f"{ranks}{number:,} × {device_name(wanted)}"


def num_devices(num_ranks: int, wanted: str, ranks_per_device: int) -> int:
    """Returns the number of devices that the ranks of a world have: fewer if they share those of
    this machine. `wanted` is `training.device`."""
    if ranks_per_device == 1 or device_type(wanted) != "cuda":
        return num_ranks
    import torch

    return min(num_ranks, torch.cuda.device_count())


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
    context = CONTEXT_BYTES if ranks_per_device > 1 else 0
    return max(0, whole // ranks_per_device - context)


def device_identity(device: torch.device) -> tuple[str, str]:
    """Returns the host and words that no other GPU of it has."""
    import torch

    return socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)


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
    for group, version in _control_groups():
        with suppress(OSError, ValueError):  # missing, or "max"
            most.append(int((group / version.limit).read_text()) + swap)
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
    for group, version in _control_groups():
        with suppress(OSError, ValueError, KeyError):  # missing, or "max"
            limit = int((group / version.limit).read_text())
            used = int((group / version.used).read_text())
            words = (group / "memory.stat").read_text().split()
            cached = int(dict(zip(words[::2], words[1::2], strict=True))[version.cached])
            free.append(limit - used + cached)
    return min(free)


def share_devices(rank: int, env: MutableMapping[str, str] = os.environ) -> None:
    """Sets what NCCL reads, before its first call. What the user has set stays."""
    env["NCCL_HOSTID"] = f"rank{rank}"
    env.setdefault("NCCL_NET", "Socket")
    env.setdefault("NCCL_SOCKET_IFNAME", "lo")  # exists on every machine and is always up


def refusal_to_share(ranks_per_device: int, why: str) -> str:
    """Returns why ranks cannot share devices, and the way out."""
    return f"{RANKS_PER_DEVICE} = {ranks_per_device}, but {why}; remove the key, or set it to 1"


def require_intended_devices(devices: list[tuple[str, str]], ranks_per_device: int) -> None:
    """Raises if ranks share devices otherwise than the config says. NCCL would refuse too many on a
    device in words of its own; ranks that share none would each use a part of it, and sockets.
    `devices`: the host and an identity of the device, for every rank."""
    hosts = {host for host, _ in devices}
    if ranks_per_device > 1 and len(hosts) > 1:
        why = f"ranks share GPUs of one machine only, and these are on {len(hosts)}"
        raise TrainingError(refusal_to_share(ranks_per_device, why))
    if ranks_per_device > 1 and len(set(devices)) == len(devices):
        why = "no two ranks share a GPU, so each would leave most of its own unused"
        raise TrainingError(refusal_to_share(ranks_per_device, why))
    by_device: dict[tuple[str, str], list[int]] = {}
    for rank, device in enumerate(devices):
        by_device.setdefault(device, []).append(rank)
    ranks = max(by_device.values(), key=len)
    if len(ranks) > ranks_per_device:
        few = ", ".join(map(str, ranks[:4])) + (" …" if len(ranks) > 4 else "")
        raise TrainingError(
            f"{len(ranks)} ranks ({few}) have the same GPU, and {RANKS_PER_DEVICE} = "
            f"{ranks_per_device}. Start one rank per device, or set {RANKS_PER_DEVICE}="
            f"{len(ranks)} to try this layout on fewer devices"
        )


def mps_note(env: MutableMapping[str, str] = os.environ) -> str:
    """Returns what to say if NVIDIA's MPS does not run; empty if it does."""
    pipes = Path(env.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    if (pipes / "control").exists():
        return ""
    return (
        "the ranks take turns on their device; start `nvidia-cuda-mps-control -d` first to let "
        "them compute side by side"
    )


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


class _Groups(NamedTuple):
    """Where a version of control groups says what a group may use, and uses."""

    root: str
    limit: str
    used: str
    cached: str  # in memory.stat


_GROUPS = _Groups("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_OLD_GROUPS = _Groups(
    "/sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)


def _control_groups() -> list[tuple[Path, _Groups]]:
    """Returns this process's control groups and their parents: each may set a limit. In a
    container, a group may be mounted as the root."""
    groups = [(Path(version.root), version) for version in (_GROUPS, _OLD_GROUPS)]
    for line in _lines("/proc/self/cgroup"):
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        version = _OLD_GROUPS if kinds else _GROUPS
        root = Path(version.root)
        group = root / path.lstrip("/")
        above = [parent for parent in group.parents if root in parent.parents]
        groups += [(one, version) for one in (group, *above)]
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
