"""Process groups and collectives: backends, timeouts, and sums over ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed.distributed_c10d import _set_pg_timeout

from overland.config.schema import Comm
from overland.errors import FromFirstRank
from overland.parallel.mesh import SHARDS, Mesh
from overland.world import World
from overland.world.devices import (
    device_identity,
    device_memory,
    require_intended_devices,
    share_devices,
)
from overland.world.exchange import all_gather, broadcast, greet, part
from overland.world.rendezvous import open_store, secret_of, wait_for_all

T = TypeVar("T")

from_first_rank = broadcast
"""Returns rank 0's value, or another's, on every rank."""
all_of = all_gather
"""Returns the values of all ranks, in rank order, on every rank."""


@contextmanager
def process_group(comm: Comm, world: World, device_type: str) -> Iterator[torch.device]:
    """Joins the process group and yields this rank's device; leaves the group at the end."""
    device = own_device(comm.ranks_per_device, world, device_type)
    if comm.backend == "nvshmem":
        symmetric_memory.set_backend("NVSHMEM")
    alone = world.size == 1  # no port to open
    shows_errors = sys.excepthook
    store = dist.HashStore() if alone else open_store(world, comm.init_timeout_seconds)
    if not alone:
        wait_for_all(store, world, comm.init_timeout_seconds)
    dist.init_process_group(
        backend_string(comm.backend, device_type),
        rank=world.rank,
        world_size=world.size,
        store=store,
        timeout=timedelta(seconds=comm.init_timeout_seconds),
    )
    try:
        if not alone:
            greet(secret_of())
        # AMD's identities are untested. Only NCCL minds ranks that share unasked.
        minds = comm.ranks_per_device > 1 or (comm.backend != "gloo" and not alone)
        if device.type == "cuda" and not torch.version.hip and minds:
            require_intended_devices(all_gather(device_identity(device)), comm.ranks_per_device)
        yield device
    finally:
        part()
        dist.destroy_process_group()
        if alone:  # torch has replaced it by one that begins each line with [rank0]:
            sys.excepthook = shows_errors


def own_device(ranks_per_device: int, world: World, device_type: str) -> torch.device:
    """Returns this rank's device, and makes it the current one. To be called before NCCL is."""
    if device_type != "cuda":
        return torch.device("cpu")
    # A rank that sees only one device uses that one.
    device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if ranks_per_device > 1:
        share_devices(world.rank)
        part = device_memory(device, ranks_per_device) / device_memory(device)
        torch.cuda.set_per_process_memory_fraction(part)
    return device


def warm_up(mesh: Mesh) -> None:
    """Does a first, tiny all-reduce in every group. Backends connect at their first call, which
    takes minutes with thousands of ranks: this way it happens under the long timeout, and not
    inside a step."""
    for group in mesh.groups:
        dist.all_reduce(torch.zeros(1, device=mesh.device_type), group=group)
    dist.barrier()


def set_timeout(mesh: Mesh, seconds: int) -> None:
    """Sets the timeout of collectives from now on."""
    for group in mesh.groups:
        _set_pg_timeout(timedelta(seconds=seconds), group)


def backend_string(backend: str, device_type: str) -> str:
    """Returns the backends: one for the device's tensors, and always one for tensors in host
    memory."""
    if device_type == "cpu":
        return "gloo" if backend in ("auto", "nccl", "nvshmem") else backend
    return f"cpu:gloo,{device_type}:{'nccl' if backend in ('auto', 'nvshmem') else backend}"


def _functional(new: str, old: str) -> Callable[..., torch.Tensor]:
    """Returns a collective that can be compiled; torch 2.13 renamed them."""
    found: Callable[..., torch.Tensor] = getattr(functional, new, None) or getattr(functional, old)
    return found


gather = _functional("all_gather_single", "all_gather_tensor")
gather_with_gradient = _functional("all_gather_single_autograd", "all_gather_tensor_autograd")
sum_and_scatter = _functional("reduce_scatter_single", "reduce_scatter_tensor")


def once_for_all(make: Callable[[], T]) -> T:
    """Calls `make` on rank 0 only, and returns its result, or raises its error, on every rank."""
    value, problem = None, None
    if dist.get_rank() == 0:
        try:
            value = make()
        except Exception as error:
            problem = error
    value, words = from_first_rank((value, str(problem) if problem else ""))
    if problem is not None:
        raise problem
    if words:
        raise FromFirstRank(words)
    return value  # type: ignore[return-value]


def first_problem(problem: str) -> str:
    """Returns the problem of the first rank that has one, on every rank; empty if none has one."""
    size = dist.get_world_size()
    whose = torch.tensor([dist.get_rank() if problem else size])
    dist.all_reduce(whose, dist.ReduceOp.MIN)
    return from_first_rank(problem, int(whose)) if int(whose) < size else ""


def sum_over(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sums over all ranks of a group, in place."""
    dist.all_reduce(value, group=group)
    return value


def total_sums(sums: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Sums over the ranks that hold different tokens; the result is known on every stage."""
    return sum_over(sum_over(sums, mesh.token_group), mesh.axis("pp").get_group())


def sum_of_model(value: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Sums over the ranks that hold different parts of the model, in place."""
    for axis in (*SHARDS, "pp"):
        sum_over(value, mesh.parameters.get_group(axis))
    return value


def sum_with_own_gradient(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sums over all ranks of a group, each of which then does the same computation with the result:
    so a rank's own gradient is complete, and nothing is summed in the backward pass."""
    total: torch.Tensor = _SumWithOwnGradient.apply(values, group)
    return total


class _SumWithOwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return sum_over(values.clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
