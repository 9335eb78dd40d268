"""A task, one per device: connects to the conductor, follows its orders, and ends when it is
gone."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping

from overland.cluster.preflight import link, node
from overland.cluster.preflight.all_reduce import measure_all_reduce
from overland.cluster.preflight.child import in_child
from overland.cluster.preflight.device import measure_cpu, measure_device
from overland.cluster.wire import Message, Wire
from overland.world import World
from overland.world.devices import may_have_accelerator
from overland.world.heartbeat import node_name
from overland.world.launchers import find_world


def run_task(env: Mapping[str, str] = os.environ) -> None:
    # One thread: the same order of sums everywhere, and no threads in a process that forks.
    os.environ["OMP_NUM_THREADS"] = "1"
    world = find_world(env) or World()
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # meant for ranks, which can save
        signal.signal(number, signal.SIG_IGN)
    wire = Wire.to_first_node(env)
    wire.send({"hello": _hello(world, env)})
    task = _Task(world, wire)
    for order in _orders(wire):
        try:
            answer = task.do(order)
        except Exception as error:  # report any error to the conductor
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        wire.send({**answer, "answer": order["number"]})


def _hello(world: World, env: Mapping[str, str]) -> Message:
    step = env.get("SLURM_STEP_ID")
    return {
        "node": node_name(env),
        "rank": world.rank,
        "local": world.local_rank,
        "step": f"{env.get('SLURM_JOB_ID')}.{step}" if step else None,
        "accelerator": may_have_accelerator(),
    }


def _orders(wire: Wire) -> Iterator[Message]:
    while (heard := wire.receive()) is not None:
        for message in heard:
            if message.get("do") == "end":
                return
            if "do" in message:
                yield message


class _Task:
    def __init__(self, world: World, wire: Wire) -> None:
        self.world, self.wire = world, wire
        self.listener: socket.socket | None = None

    def do(self, order: Message) -> Message:
        wire, local = self.wire, self.world.local_rank
        match order["do"]:
            case "clock":
                return node.measure_clock(wire)
            case "torch":
                return self._load_torch()
            case "listen":
                self.listener = link.listen()
                host, port = self.listener.getsockname()
                return {"at": f"{host}:{port}"}
            case "link" | "reduce":
                return self._meet(order)
            case "versions":
                return in_child(lambda stage: _versions(order), order["seconds"], wire)
            case "disk":
                return in_child(lambda stage: _disks(order), order["seconds"], wire)
            case "device":
                if order["torch"]:
                    return in_child(lambda s: measure_device(local, s), order["seconds"], wire)
                return in_child(measure_cpu, order["seconds"], wire)
        return {"error": f"unknown order {order['do']}"}

    def _load_torch(self) -> Message:
        """Imports torch once, before children are forked. Does not look for devices, which would
        touch them."""
        import torch
        import torch.distributed

        return {"version": torch.__version__}

    def _meet(self, order: Message) -> Message:
        """Measures together with other tasks; the one that was told to listen accepts them."""
        held, self.listener = self.listener, None
        listener = held if order["listening"] else None
        local = self.world.local_rank
        if order["do"] == "reduce":
            work = lambda stage: measure_all_reduce(order, listener, local, stage)
        elif order["torch"]:
            work = lambda stage: link.through_group(order, listener, local, stage)
        else:
            work = lambda stage: link.through_socket(order, listener, stage)
        try:
            return in_child(work, order["seconds"], self.wire)
        finally:
            if held is not None:
                held.close()


def _versions(order: Message) -> Message:
    found = node.measure_versions(order["config"], order["torch"])
    return {"versions": found, "interfaces": node.measure_interfaces()}


def _disks(order: Message) -> Message:
    places = node.written_folders(order["folder"])
    return {name: node.measure_disk(folder, order["num_bytes"]) for name, folder in places.items()}
