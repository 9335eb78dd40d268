"""Rank 0 of a world whose other ranks do not exist: one GPU does the work of one rank of 8 or 64.

The collectives of the backend `local` are answered by this process alone, as if every rank held
what it holds: a gather fills its output from the rank's own shard, a reduce-scatter takes the
rank's slice, a sum multiplies by the number of ranks. So every buffer has its real size and
plausible numbers (never zeros or uninitialized memory, on which a GPU computes faster), and every
copy around a collective is made. They run on the stream that asks for them.

With a network, each collective takes at least as long as an α-β model says: α + bytes / β, where
bytes are those that a ring sends, (n - 1) / n of the whole. It begins when the collective before it
has ended, also on another stream, as in a communicator of NCCL. The stream waits on the device,
after the copy. What is left out: NCCL's kernels occupy some of the SMs meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

BACKEND = "local"


@dataclass(frozen=True)
class Network:
    """α and β of one rank's collectives."""

    seconds: float
    bytes_per_second: float

    def nanoseconds(self, num_bytes: int, num_ranks: int) -> int:
        sent = num_bytes * (num_ranks - 1) / num_ranks
        return round(1e9 * (self.seconds + sent / self.bytes_per_second))


NETWORKS = {
    "none": None,
    # nccl-tests on 8 × H100: a bus bandwidth of about 360 GB/s for gathers and reduce-scatters of
    # a few hundred MB, and about 30 µs for small ones.
    "nvlink": Network(30e-6, 360e9),
    # 400 Gb/s per GPU: 50 GB/s on the wire, of which NCCL reaches about 90 %.
    "400g": Network(100e-6, 45e9),
}


class LocalGroup(dist.ProcessGroup):
    """A process group in which this process is the first rank and the only one that exists."""

    def __init__(self, network: Network | None, _: Any, rank: int, size: int, __: Any) -> None:
        assert rank == 0, "a local world has its first rank only"
        super().__init__(rank, size)
        self._network = network

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return c10d._world.pg_names[self]

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [mine])

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        for tensor in tensors:
            with self._sent([tensor], rounds=2):  # a reduce-scatter and a gather
                if (factor := self._factor(opts)) != 1:
                    tensor.mul_(factor)
        return done(tensors)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        for all_of, mine in zip(outputs, inputs, strict=True):
            for one in all_of:
                one.copy_(mine)
        return done([one for all_of in outputs for one in all_of])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        with self._sent(outputs):
            for output, mine in zip(outputs, inputs, strict=True):
                mine = mine.contiguous()
                if output.is_cuda:
                    launch("local_gather", mine.numel(), output, mine, mine.numel(), self.size())
                else:
                    output.view(self.size(), -1).copy_(mine.view(-1).clone())
        return done(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> dist.Work:
        factor = self._factor(opts)
        with self._sent(inputs):
            for output, given in zip(outputs, inputs, strict=True):
                if output.is_cuda:
                    launch("local_slice", output.numel(), output, given, output.numel(), factor)
                else:
                    output.copy_(given.view(self.size(), -1)[0].view_as(output) * factor)
        return done(outputs)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return done(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        return done([])

    # As torch 2.11 calls them.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allreduce_coalesced = allreduce
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _factor(self, opts: Any) -> int:
        """Returns by what the numbers of equal ranks are multiplied: an average, a maximum or a
        minimum of them is the number itself."""
        kinds = dist.ReduceOp
        is_same = opts is not None and opts.reduceOp in (kinds.AVG, kinds.MAX, kinds.MIN)
        return 1 if is_same else self.size()  # a sum, or one of numbers multiplied beforehand

    @contextmanager
    def _sent(self, tensors: Sequence[Tensor], rounds: int = 1) -> Iterator[None]:
        """Makes the current stream take as long as the network does to send these in one launch."""
        device = tensors[0].device
        if self._network is None or device.type != "cuda" or self.size() == 1:
            yield
            return
        num_bytes = sum(one.nbytes for one in tensors)
        span = rounds * self._network.nanoseconds(num_bytes, self.size())
        end = torch.empty(1, dtype=torch.int64, device=device)
        kernels().network_begin[(1,)](busy_until(device), end, span)
        yield
        kernels().network_end[(1,)](end)


def done(tensors: Sequence[Tensor]) -> dist.Work:
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result([*tensors])
    return torch._C._distributed_c10d._create_work_from_future(future)


@cache
def busy_until(device: torch.device) -> Tensor:
    """When the links are free again, by the device's timer."""
    return torch.zeros(1, dtype=torch.int64, device=device)


def launch(name: str, size: int, *args: Any) -> None:
    block = kernels().BLOCK
    getattr(kernels(), name)[(-(-size // block),)](*args, BLOCK=block, num_warps=8)


def kernels() -> Any:
    import local_world_kernels  # needs Triton

    return local_world_kernels


def use(network: str = "none") -> None:
    """Makes every process group of this process a local one, whatever backend is asked for."""
    create = partial(LocalGroup, NETWORKS[network])
    dist.Backend.register_backend(BACKEND, create, devices=["cpu", "cuda"])
    initialize, new_group = dist.init_process_group, dist.new_group

    def init_process_group(*_: Any, rank: int = -1, world_size: int = -1, **__: Any) -> None:
        size = world_size if world_size > 0 else int(os.environ["WORLD_SIZE"])
        initialize(BACKEND, rank=max(rank, 0), world_size=size, store=dist.HashStore())

    def group(ranks: Any = None, *_: Any, group_desc: str | None = None, **__: Any) -> Any:
        return new_group(ranks, backend=BACKEND, group_desc=group_desc)

    dist.init_process_group = init_process_group  # type: ignore[assignment]
    dist.new_group = group


@contextmanager
def process_group(size: int, device_type: str) -> Iterator[torch.device]:
    """Joins a local world of this size, as `parallel.comm.process_group` joins a real one."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(rank=0, world_size=size)
    try:
        yield device
    finally:
        dist.destroy_process_group()
