"""A pool of local processes that run small distributed programs, for proofs and tests.

Importing torch takes seconds, so the processes live as long as the pool, and all are forked from
one that has imported it. Each call joins them into a new world of the requested size, with gloo on
the CPU, or with NCCL on the GPUs of this machine, which they share if there are too few.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import _lru_cache_wrapper
from multiprocessing.connection import Connection, wait
from typing import Any

from overland.world import World

TIMEOUT_SECONDS = {"cpu": 300, "cuda": 150}  # many a test's ranks may share a CPU's cores


def clean_processes() -> mp.context.ForkServerContext:
    """Returns a context whose processes are forked from one that has imported torch and computed
    nothing: a fork of a process that has computed lacks its threads, and may crash."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["overland.training.loop"])
    return context


class RankPool:
    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type
        self._context = clean_processes()
        self._ranks: list[tuple[mp.process.BaseProcess, Connection]] = []

    def run(
        self, num_ranks: int, function: Callable[..., Any], *args: Any, num_nodes: int = 1
    ) -> list[Any]:
        """Calls `function(world, *args)` on each rank; returns their results by rank. With several
        simulated nodes, each rank shares its node with only some of the others."""
        while len(self._ranks) < num_ranks:
            self._ranks.append(self._start())
        with tempfile.NamedTemporaryFile() as meeting_point:
            for rank in range(num_ranks):
                per_node = num_ranks // num_nodes
                world = World(rank, num_ranks, rank % per_node, per_node)
                pipe = self._ranks[rank][1]
                pipe.send(os.getcwd())  # first: reading the function may import its module
                pipe.send((function, world, meeting_point.name, args))
            results = _answers([pipe for _, pipe in self._ranks[:num_ranks]], self.device_type)
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(results) if not ok]
        if failures:
            self.close()  # ranks may be stuck in different places: start new ones next time
            raise AssertionError("\n".join(failures))
        return [value for _, value in results]

    def close(self) -> None:
        for process, _ in self._ranks:
            process.kill()
            process.join(10)  # the driver may hold a process whose kernels wait for another rank
        self._ranks.clear()

    def _start(self) -> tuple[mp.process.BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self.device_type), daemon=True)
        process.start()
        return process, ours


def _answers(pipes: list[Connection], device_type: str) -> list[tuple[bool, Any]]:
    """Returns whether each rank succeeded, and its result or the error. Once one has failed, the
    others may wait for it forever."""
    answers: dict[Connection, tuple[bool, Any]] = dict.fromkeys(pipes, (False, "no answer"))
    waiting, patience = set(pipes), float(TIMEOUT_SECONDS[device_type])
    while waiting and (ready := wait(waiting, patience)):
        for pipe in waiting.intersection(ready):
            waiting.remove(pipe)
            try:
                answers[pipe] = pipe.recv()
            except (EOFError, OSError):
                answers[pipe] = False, "the process is gone"
            if not answers[pipe][0]:
                patience = 2
    return [answers[pipe] for pipe in pipes]


def _serve(pipe: Connection, device_type: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from overland.parallel.comm import backend_string, own_device

    torch.set_num_threads(1)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # simulated nodes are all here
    while True:
        try:
            os.chdir(pipe.recv())  # the folder that the caller is in now
            function, world, meeting_point, args = pipe.recv()
            store = dist.FileStore(meeting_point, world.size)
            devices = torch.cuda.device_count() if device_type == "cuda" else world.size
            own_device(-(-world.size // devices), world, device_type)
            backend = backend_string("auto", device_type)
            faulthandler.dump_traceback_later(TIMEOUT_SECONDS[device_type] - 10)
            dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size)
            result = function(world, *args)
            dist.destroy_process_group()
            forget_meshes()
            # Only now: a rank that cannot leave its world is a fault of this call, not of the next.
            pipe.send((True, result))
        except EOFError:  # the pool is gone
            return
        except BaseException:  # the pool ends all its ranks then
            pipe.send((False, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()


def forget_meshes() -> None:
    """Clears the caches of DTensor and the compiler. They cache results for a mesh, including its
    group names, and mistake another world's mesh of the same shape for it. A process that joins
    several worlds, as in `overland check` and in pools of ranks, must clear them."""
    import torch
    from torch.distributed.tensor import _collective_utils, _redistribute, _sharding_prop

    if "torch._dynamo" in sys.modules:  # its import takes a second
        torch._dynamo.reset()
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()
    for module in (_collective_utils, _redistribute, _sharding_prop):
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        for owner in (module, *classes):
            for value in vars(owner).values():
                cached = getattr(value, "__func__", value)  # of a static or class method
                if isinstance(cached, _lru_cache_wrapper):
                    cached.cache_clear()
    propagator = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
