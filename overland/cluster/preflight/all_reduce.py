"""One all-reduce over all tasks that are good so far, as in training, and the network it used.

NCCL and RCCL log which network they use between nodes. Without the network plugin of a fabric they
silently fall back to TCP, which is several times slower.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path

from overland.cluster.preflight.child import Stage
from overland.cluster.preflight.link import group
from overland.cluster.wire import Message

CPU_BYTES = 4 * 2**20
ACCELERATOR_BYTES = 64 * 2**20
REPEATS = 5

TCP = "Socket"
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


def measure_all_reduce(
    order: Message, listener: socket.socket | None, local_rank: int, stage: Stage
) -> Message:
    import torch
    import torch.distributed as dist

    rank, size = order["rank"], order["size"]
    with (
        nccl_log() as log,
        group(order, listener, rank, size, local_rank, stage) as (device, _),
    ):
        num_bytes = CPU_BYTES if device.type == "cpu" else ACCELERATOR_BYTES
        # Small integers, so that every sum is exact in float32, in any order.
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
        network = measure_transport(log)
    # Bus bandwidth: what a ring sends and receives per rank, comparable between numbers of ranks.
    rate = 2 * (size - 1) / size * num_bytes / seconds / 1e9
    return {"right": right, "gb_per_s": rate, **network}


@contextmanager
def nccl_log(env: MutableMapping[str, str] = os.environ) -> Iterator[Path]:
    """Yields the file that NCCL logs to, if it is initialized within this context."""
    before = {name: env.get(name) for name in (*LOG, "NCCL_DEBUG_FILE")}
    with tempfile.TemporaryDirectory(prefix="overland-nccl-") as folder:
        path = Path(folder) / "log"
        env.update({**LOG, "NCCL_DEBUG_FILE": str(path)})
        try:
            yield path
        finally:
            for name, value in before.items():
                if value is None:
                    env.pop(name, None)
                else:
                    env[name] = value


def measure_transport(log: Path) -> dict[str, object]:
    """Returns the transport and the fabrics of this node; nothing if there is no log."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return {}
    return {"transport": transport_in(text), "fabrics": fabrics()}


def transport_in(log: str) -> str | None:
    """Returns `Socket` (TCP), `IB`, `AWS Libfabric` or another plugin; None if not in the log."""
    chosen = CHOSEN.findall(log)
    if chosen:
        return str(chosen[-1]).strip()
    used = USED.findall(log)
    return str(used[-1]) if used else None


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


def judge_transport(
    answers: Mapping[tuple[str, int], Mapping[str, object]],
) -> tuple[str | None, str]:
    """Returns (transport in use, problem with it), from the answers of all tasks."""
    found = {str(facts["transport"]) for facts in answers.values() if facts.get("transport")}
    transport = ", ".join(sorted(found)) or None
    slow = {
        node: facts["fabrics"]
        for (node, _), facts in answers.items()
        if facts.get("transport") == TCP and facts.get("fabrics")
    }
    if not slow or len({node for node, _ in answers}) < 2:  # a single node uses no network
        return transport, ""
    node, names = next(iter(slow.items()))
    where = f"{len(slow)} nodes, such as {node}," if len(slow) > 1 else node
    fabric = " and ".join(map(str, names)) if isinstance(names, list) else str(names)
    return transport, (
        f"collectives of {where} use TCP (NET/Socket) although there is {fabric}, which is "
        "several times faster: NCCL or RCCL did not find the network plugin; load the cluster's "
        "module for it, or add its folder to LD_LIBRARY_PATH (NCCL_DEBUG=INFO logs what is tried)"
    )
