"""Several ranks on one GPU, to try a layout of eight where there is one device.

NCCL refuses two ranks on one device of a host. Here every rank is a host of its own to NCCL, which
then sends through sockets: losses, saves and failures are those of real devices, speed is not.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

from overland.errors import TrainingError
from overland.world import World

KEY = "comm.ranks_per_device"


def share_devices(world: World, env: MutableMapping[str, str] = os.environ) -> None:
    """Sets what NCCL reads, before its first call. What the user has set stays."""
    env["NCCL_HOSTID"] = f"rank{world.rank}"
    env.setdefault("NCCL_NET", "Socket")
    if world.size == world.local_size:  # the loopback exists on every machine and is always up
        env.setdefault("NCCL_SOCKET_IFNAME", "lo")


def require_own_device(devices: list[str], ranks_per_device: int) -> None:
    """Raises if more ranks share a device than the config says, which NCCL would refuse in words of
    its own. `devices`: an identity for every rank."""
    by_device: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        by_device.setdefault(device, []).append(rank)
    ranks = max(by_device.values(), key=len)
    if len(ranks) > ranks_per_device:
        few = ", ".join(map(str, ranks[:4])) + (" …" if len(ranks) > 4 else "")
        raise TrainingError(
            f"{len(ranks)} ranks ({few}) have the same GPU, and {KEY} = {ranks_per_device}. Start "
            f"one rank per device, or set {KEY}={len(ranks)} to try this layout on fewer devices"
        )


def mps_note(env: MutableMapping[str, str] = os.environ) -> str:
    """Returns what to say if NVIDIA's MPS does not run; empty if it does."""
    pipes = Path(env.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    if (pipes / "control").exists():
        return ""
    return (
        "the ranks take turns on their device; start `nvidia-cuda-mps-control -d` before to let "
        "them compute side by side"
    )
