"""Tests the link between two tasks: bandwidth in both directions, latency and correctness.

It uses the backend that training will use or, for `--quick`, a plain connection over the same
interface, which does not need torch.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from overland.cluster.preflight.child import Stage
from overland.cluster.preflight.device import BEST, MEDIAN
from overland.cluster.wire import ADDRESS, Message, own_address
from overland.errors import ClusterError
from overland.world import World
from overland.world.devices import share_devices

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

REPEATS = 4
PINGS = 20
SOCKET_BYTES = 4 * 2**20
CPU_BYTES = 8 * 2**20
ACCELERATOR_BYTES = 256 * 2**20  # 10 ms at 25 GB/s: long against the latency, short against 1 s
SEED = 21
TOKEN_BYTES = 32


class Channel(Protocol):
    num_bytes: int
    choose: Callable[[list[float]], float]
    """Selects which of several times counts."""

    def send(self) -> None: ...

    def receive(self) -> bool:
        """Receives a message; returns whether it is what was sent."""

    def ping(self) -> None: ...

    def pong(self) -> None: ...


def measure_link(channel: Channel, is_lower: bool, stage: Stage) -> Message:
    """Measures from one end, in lockstep with the other; each end times what it sends."""
    stage("the first contact")
    turns: list[Callable[[], None]] = [channel.ping, channel.pong]
    first, second = turns if is_lower else turns[::-1]
    first()
    second()
    stage("the ping-pong")
    start = time.perf_counter()
    for _ in range(PINGS):
        first()
        second()
    latency = (time.perf_counter() - start) / PINGS / 2
    facts: Message = {"latency_us": latency * 1e6}
    for lower_sends in (True, False):
        stage("sending" if lower_sends == is_lower else "receiving")
        if lower_sends == is_lower:
            facts["gb_per_s"] = channel.num_bytes / channel.choose(_send(channel)) / 1e9
        else:
            facts["right"] = _receive(channel)
    return facts


def _send(channel: Channel) -> list[float]:
    """Returns the seconds of each message, until the other end has confirmed it."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        channel.send()
        channel.pong()
        times.append(time.perf_counter() - start)
    return times


def _receive(channel: Channel) -> bool:
    right = True
    for _ in range(REPEATS):
        right = channel.receive() and right
        channel.ping()
    return right


def listen(env: Mapping[str, str] = os.environ) -> socket.socket:
    """Listens for a partner, only on the interface that training uses."""
    return socket.create_server((_address(env), 0), backlog=4096)


def through_socket(order: Message, listener: socket.socket | None, stage: Stage) -> Message:
    stage("meeting")
    connection = _connect(order) if listener is None else _accept(order, listener)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return measure_link(_Connection(connection), listener is not None, stage)


def through_group(
    order: Message, listener: socket.socket | None, local_rank: int, stage: Stage
) -> Message:
    rank = 1 if listener is None else 0
    with group(order, listener, rank, 2, local_rank, stage) as (device, _):
        return measure_link(_Group(device, 1 - rank), rank == 0, stage)


@contextmanager
def group(
    order: Message,
    listener: socket.socket | None,
    rank: int,
    size: int,
    local_rank: int,
    stage: Stage,
) -> Iterator[tuple[torch.device, dist.ProcessGroup]]:
    """Opens a process group whose first rank hosts the store. Failures are not cleaned up, because
    the process ends anyway."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    stage("meeting")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if order["ranks_per_device"] > 1:
            share_devices(World(rank, size, rank, size))
    limit = timedelta(seconds=order["seconds"])
    host, _, port = order["at"].rpartition(":")
    store = dist.TCPStore(
        host,
        int(port),
        is_master=rank == 0,
        wait_for_workers=False,
        timeout=limit,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    stage("connecting")
    backend = backend_for(order["backend"], device.type)
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=size,
        store=store,
        timeout=limit,
        device_id=None if backend == "gloo" else device,  # connects at once
    )
    assert dist.group.WORLD is not None
    yield device, dist.group.WORLD
    stage("parting")
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < size:  # the store ends with this process
        time.sleep(0.005)
    dist.destroy_process_group()


def backend_for(backend: str, device_type: str) -> str:
    """Returns the backend that training uses for the device. MPI has no groups of two, so gloo is
    used instead."""
    if device_type == "cpu" or backend == "mpi":
        return "gloo"
    return "nccl" if backend in ("auto", "nvshmem") else backend


class _Connection:
    num_bytes = SOCKET_BYTES
    choose = staticmethod(BEST)

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sent = random.Random(SEED).randbytes(self.num_bytes)
        self._got = bytearray(self.num_bytes)

    def send(self) -> None:
        self._socket.sendall(self._sent)

    def receive(self) -> bool:
        _fill(self._socket, memoryview(self._got))
        return self._got == self._sent

    def ping(self) -> None:
        self._socket.sendall(b".")

    def pong(self) -> None:
        _fill(self._socket, memoryview(bytearray(1)))


class _Group:
    """A channel to the other rank of a group of two."""

    def __init__(self, device: torch.device, other: int) -> None:
        import torch
        import torch.distributed as dist

        is_cpu = device.type == "cpu"
        self.num_bytes = CPU_BYTES if is_cpu else ACCELERATOR_BYTES
        self.choose = BEST if is_cpu else MEDIAN
        self._other, self._dist = other, dist
        self._settle = (lambda: None) if is_cpu else partial(torch.cuda.synchronize, device)
        self._sent = torch.arange(self.num_bytes // 4, dtype=torch.int32, device=device)
        self._got = torch.empty_like(self._sent)
        self._one = torch.zeros(1, device=device)

    def send(self) -> None:
        self._dist.send(self._sent, self._other)
        self._settle()

    def receive(self) -> bool:
        self._got.zero_()
        self._dist.recv(self._got, self._other)
        return self._got.equal(self._sent)

    def ping(self) -> None:
        self._dist.send(self._one, self._other)
        self._settle()

    def pong(self) -> None:
        self._dist.recv(self._one, self._other)
        self._settle()


def _address(env: Mapping[str, str] = os.environ) -> str:
    """Returns the address of the configured interface, or of the one that leads to the
    conductor."""
    return own_address([env[ADDRESS].rpartition(":")[0]], env)


def _connect(order: Message) -> socket.socket:
    host, _, port = order["at"].rpartition(":")
    connection = socket.create_connection(
        (host, int(port)), timeout=order["seconds"], source_address=(_address(), 0)
    )
    connection.sendall(order["token"].encode())
    return connection


def _accept(order: Message, listener: socket.socket) -> socket.socket:
    """Accepts a connection from the partner, which alone knows the token from the conductor."""
    listener.settimeout(order["seconds"])
    connection, _ = listener.accept()
    connection.settimeout(order["seconds"])
    token = bytearray(TOKEN_BYTES)
    _fill(connection, memoryview(token))
    if token.decode(errors="replace") != order["token"]:
        raise ClusterError("an unknown process connected instead of the partner")
    return connection


def _fill(connection: socket.socket, target: memoryview) -> None:
    while target:
        count = connection.recv_into(target)
        if not count:
            raise ClusterError("the partner closed the connection")
        target = target[count:]
