"""One sum over all tasks that are good so far, as training does it: right, and how fast."""

from __future__ import annotations

import socket
import time

from overland.tools.preflight import transport
from overland.tools.preflight.child import Stage
from overland.tools.preflight.link import group
from overland.world.wire import Message

CPU_BYTES = 4 * 2**20
ACCELERATOR_BYTES = 64 * 2**20
REPEATS = 5


def measure(
    order: Message, listener: socket.socket | None, local_rank: int, stage: Stage
) -> Message:
    import torch
    import torch.distributed as dist

    rank, size = order["rank"], order["size"]
    with (
        transport.logged() as log,
        group(order, listener, rank, size, local_rank, stage) as (device, _),
    ):
        num_bytes = CPU_BYTES if device.type == "cpu" else ACCELERATOR_BYTES
        # Small whole numbers, so that float32 holds every sum exactly, in any order.
        terms = [r % 8 + 1 for r in range(size)]
        tensor = torch.empty(num_bytes // 4, device=device)
        dist.all_reduce(tensor.fill_(terms[rank]))
        right = bool((tensor == sum(terms)).all())
        stage("summing")
        start = time.perf_counter()
        for _ in range(REPEATS):
            dist.all_reduce(tensor.fill_(terms[rank]))
        right = right and bool((tensor == sum(terms)).all())  # waits for the device
        seconds = (time.perf_counter() - start) / REPEATS
        network = transport.measure(log)
    # What a ring sends and receives, per rank: comparable over numbers of ranks.
    rate = 2 * (size - 1) / size * num_bytes / seconds / 1e9
    return {"right": right, "gb_per_s": rate, **network}
