"""Process groups: which backend, how long to wait, and a first meeting of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from overland.cluster.world import World
from overland.config.schema import Comm


@contextmanager
def process_group(comm: Comm, world: World, device_type: str) -> Iterator[torch.device]:
    """Joins the world and yields this rank's device; leaves the world at the end."""
    device = torch.device(device_type, world.local_rank) if device_type == "cuda" else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend_string(comm.backend, device_type),
        rank=world.rank,
        world_size=world.size,
        store=dist.HashStore() if world.size == 1 else None,  # alone: no port to open
        timeout=timedelta(seconds=comm.init_timeout_seconds),
    )
    try:
        yield device or torch.device("cpu")
    finally:
        dist.destroy_process_group()


def backend_string(backend: str, device_type: str) -> str:
    """A backend for the device's tensors, and always one for tensors in host memory."""
    if device_type == "cpu":
        return "gloo" if backend in ("auto", "nccl", "nvshmem") else backend
    return f"cpu:gloo,{device_type}:{'nccl' if backend in ('auto', 'nvshmem') else backend}"


def _functional(new: str, old: str) -> Callable[..., torch.Tensor]:
    """Collectives that compiled code can hold; torch 2.13 gave them new names."""
    found: Callable[..., torch.Tensor] = getattr(functional, new, None) or getattr(functional, old)
    return found


gather = _functional("all_gather_single", "all_gather_tensor")
gather_with_gradient = _functional("all_gather_single_autograd", "all_gather_tensor_autograd")
sum_and_scatter = _functional("reduce_scatter_single", "reduce_scatter_tensor")


def sum_over(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The sum over all ranks of a group, in place."""
    dist.all_reduce(value, group=group)
    return value
