"""Measures the network: bandwidth, latency and correctness of the link between two tasks, an
all-reduce over all tasks that are good so far, and the transport that NCCL chose.

A link is tested for bandwidth in both directions, latency and correctness, over the backend that
training will use or, for `--quick`, a plain connection over the same interface, which does not need
torch. NCCL and RCCL log which network they use between nodes: without the network plugin of a
fabric they silently fall back to TCP, which is several times slower.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overland.cluster.preflight.measure import BEST, MEDIAN, Stage, settler
from overland.cluster.wire import ADDRESS, Message, own_address
from overland.errors import ClusterError
from overland.world.devices import share_devices

if TYPE_CHECKING:
    import torch

REPEATS = 4
PINGS = 20
SOCKET_BYTES = 4 * 2**20
CPU_BYTES = 8 * 2**20
ACCELERATOR_BYTES = 256 * 2**20  # 10 ms at 25 GB/s: long against the latency, short against 1 s
SUM_CPU_BYTES, SUM_ACCELERATOR_BYTES = 4 * 2**20, 64 * 2**20
SUM_REPEATS = 5
SEED = 21
TOKEN_BYTES = 32

# NCCL up to 2.26 logs "Using network", later versions "Assigned NET plugin"; both name the network
# once it is chosen, after the lines of all that were tried.
CHOSEN = re.compile(
    r"NCCL INFO (?:Using network|Assigned NET plugin|Initialized NET plugin) (.+?)(?: to comm.*)?$",
    re.MULTILINE,
)
USED = re.compile(r"NCCL INFO NET/(IB|OFI|Socket)\b.*\b(?:Using|Selected)\b")
LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}

# Where Linux lists the devices of a fabric -> the name of the fabric.
FABRICS = {"cxi": "Slingshot", "infiniband": "InfiniBand", "efa": "EFA"}


@dataclass
class Channel:
    """One end of a link. Messages are arrays or tensors."""

    push: Callable[[Any], None]
    """Sends a message."""
    pull: Callable[[Any], None]
    """Receives a message into an array."""
    choose: Callable[[list[float]], float]
    """Selects which of several times counts."""
    sent: Any
    """A long message, which both ends know."""
    got: Any
    """Room for a long message."""
    short: Any


def measure_link(channel: Channel, is_lower: bool, stage: Stage) -> Message:
    """Measures from one end, in lockstep with the other; each end times what it sends."""

    def ping_pong() -> None:
        for turn in (channel.push, channel.pull) if is_lower else (channel.pull, channel.push):
            turn(channel.short)

    stage("the first contact")
    ping_pong()
    stage("the ping-pong")
    latency = _seconds_of(ping_pong, PINGS) / PINGS / 2
    facts: Message = {"latency_us": latency * 1e6}
    for lower_sends in (True, False):
        stage("sending" if lower_sends == is_lower else "receiving")
        if lower_sends == is_lower:
            times = [_seconds_of(partial(_send, channel)) for _ in range(REPEATS)]
            facts["gb_per_s"] = channel.sent.nbytes / channel.choose(times) / 1e9
        else:
            arrived = [_receive(channel) for _ in range(REPEATS)]
            facts["right"] = all(arrived)
    return facts


def _seconds_of(work: Callable[[], None], repeats: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return time.perf_counter() - start


def _send(channel: Channel) -> None:
    """Sends a long message and waits until the other end has confirmed it."""
    channel.push(channel.sent)
    channel.pull(channel.short)


def _receive(channel: Channel) -> bool:
    """Receives a long message and confirms it; returns whether it is what was sent."""
    channel.got[:] = 0
    channel.pull(channel.got)
    right = bool((channel.got == channel.sent).all())
    channel.push(channel.short)
    return right


def listen(env: Mapping[str, str] = os.environ) -> socket.socket:
    """Listens for others, only on the interface that training uses."""
    return socket.create_server((_address(env), 0), backlog=4096)


def through_socket(order: Message, listener: socket.socket | None, stage: Stage) -> Message:
    import numpy as np

    stage("meeting")
    connection = _connect(order) if listener is None else _accept(order, listener)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = np.random.default_rng(SEED).integers(0, 256, SOCKET_BYTES, np.uint8)
        room, short = np.empty_like(sent), np.zeros(1, np.uint8)
        pull = partial(_fill, connection)
        channel = Channel(connection.sendall, pull, BEST, sent, room, short)
        return measure_link(channel, listener is not None, stage)


def through_group(
    order: Message, listener: socket.socket | None, local_rank: int, stage: Stage
) -> Message:
    import torch
    import torch.distributed as dist

    with group(order, listener, local_rank, stage) as device:
        is_cpu, other, settle = device.type == "cpu", 1 - order["rank"], settler(device)

        def settled(work: Callable[[torch.Tensor, int], object], message: torch.Tensor) -> None:
            work(message, other)
            settle()

        count = (CPU_BYTES if is_cpu else ACCELERATOR_BYTES) // 4
        sent = torch.arange(count, dtype=torch.int32, device=device)
        push, pull = partial(settled, dist.send), partial(settled, dist.recv)
        room, short = torch.empty_like(sent), torch.zeros(1, device=device)
        channel = Channel(push, pull, BEST if is_cpu else MEDIAN, sent, room, short)
        return measure_link(channel, order["rank"] == 0, stage)


def measure_all_reduce(
    order: Message, listener: socket.socket | None, local_rank: int, stage: Stage
) -> Message:
    import torch
    import torch.distributed as dist

    rank, size = order["rank"], order["size"]
    with tempfile.TemporaryDirectory(prefix="overland-nccl-") as folder:
        log = Path(folder) / "log"
        os.environ.update({**LOG, "NCCL_DEBUG_FILE": str(log)})  # read when the group is opened
        with group(order, listener, local_rank, stage) as device:
            num_bytes = SUM_CPU_BYTES if device.type == "cpu" else SUM_ACCELERATOR_BYTES
            # Small integers, so that every sum is exact in float32, in any order.
            terms = [r % 8 + 1 for r in range(size)]
            tensor = torch.empty(num_bytes // 4, device=device)
            dist.all_reduce(tensor.fill_(terms[rank]))
            right = bool((tensor == sum(terms)).all())
            stage("summing")
            start = time.perf_counter()
            for _ in range(SUM_REPEATS):
                dist.all_reduce(tensor.fill_(terms[rank]))
            right = right and bool((tensor == sum(terms)).all())  # waits for the device
            seconds = (time.perf_counter() - start) / SUM_REPEATS
            network: dict[str, object] = {}
            if log.exists():  # not without NCCL
                text = log.read_text(errors="replace")
                network = {"transport": transport_in(text), "fabrics": fabrics()}
    # Bus bandwidth: what a ring sends and receives per rank, comparable between numbers of ranks.
    rate = 2 * (size - 1) / size * num_bytes / seconds / 1e9
    return {"right": right, "gb_per_s": rate, **network}


@contextmanager
def group(
    order: Message, listener: socket.socket | None, local_rank: int, stage: Stage
) -> Iterator[torch.device]:
    """Opens a process group whose first rank hosts the store, and yields its device. Failures are
    not cleaned up, because the process ends anyway."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    stage("meeting")
    rank, size = order["rank"], order["size"]
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if order["ranks_per_device"] > 1:
            share_devices(rank)
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
    yield device
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


def transport_in(log: str) -> str | None:
    """Returns `Socket` (TCP), `IB`, `AWS Libfabric` or another plugin; None if not in the log."""
    named = CHOSEN.findall(log) or USED.findall(log)
    return str(named[-1]).strip() if named else None


def fabrics(root: Path = Path("/sys/class")) -> list[str]:
    """Returns the high-speed fabrics that this node has devices for."""
    return [
        name for folder, name in FABRICS.items() if any(map(_counts, (root / folder).glob("*")))
    ]


def _counts(device: Path) -> bool:
    """Whether a device counts: an Ethernet card may be listed as InfiniBand, and only its link
    layer tells them apart."""
    layers = [file.read_text().strip() for file in device.glob("ports/*/link_layer")]
    return not layers or "InfiniBand" in layers


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
    _fill(connection, token)
    if token.decode(errors="replace") != order["token"]:
        raise ClusterError("an unknown process connected instead of the partner")
    return connection


def _fill(connection: socket.socket, buffer: Any) -> None:
    target = memoryview(buffer)
    while target:
        count = connection.recv_into(target)
        if not count:
            raise ClusterError("the partner closed the connection")
        target = target[count:]
