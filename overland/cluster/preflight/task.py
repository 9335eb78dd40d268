"""A preflight task, one per device: follows the conductor's orders, runs whatever may hang or crash
in a child process, and ends when the conductor is gone.

Work that may hang or crash runs in a child process, so that the task survives. The child is forked,
so that nothing has to be imported again. Therefore the task itself must never touch a device: a
CUDA context does not survive a fork.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from overland.cluster.preflight import measure, network
from overland.cluster.preflight.measure import Stage, measure_cpu, measure_device
from overland.cluster.wire import Message, Wire
from overland.world import World
from overland.world.devices import may_have_accelerator
from overland.world.heartbeat import node_name
from overland.world.launch import PR_SET_PDEATHSIG
from overland.world.launchers import find_world

BURIAL_SECONDS = 2.0  # a process stuck in a broken driver may not even die


def run_task(env: Mapping[str, str] = os.environ) -> None:
    # One thread: the same order of sums everywhere, and no threads in a process that forks.
    os.environ["OMP_NUM_THREADS"] = "1"
    world = find_world(env) or World()
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # meant for ranks, which can save
        signal.signal(number, signal.SIG_IGN)
    wire = Wire.to_first_node(env)
    step = env.get("SLURM_STEP_ID")
    hello = {
        "node": node_name(env),
        "local": world.local_rank,
        "step": f"{env.get('SLURM_JOB_ID')}.{step}" if step else None,
        "accelerator": may_have_accelerator(),
    }
    wire.send({"hello": hello})
    task = _Task(world, wire)
    for order in _orders(wire):
        try:
            answer = task.do(order)
        except Exception as error:  # report any error to the conductor
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        wire.send({**answer, "answer": order["number"]})


def _orders(wire: Wire) -> Iterator[Message]:
    while (heard := wire.receive()) is not None:
        for message in heard:
            if message.get("do") == "end":
                return
            if "do" in message:
                yield message


class _Task:
    def __init__(self, world: World, wire: Wire) -> None:
        self.local_rank, self.wire = world.local_rank, wire
        self.listener: socket.socket | None = None

    def do(self, order: Message) -> Message:
        match order["do"]:
            case "clock":
                return measure.measure_clock(self.wire)
            case "torch":
                # Once, before children are forked; looking for devices would touch them.
                import torch.distributed  # noqa: F401

                return {}
            case "listen":
                self.listener = network.listen()
                host, port = self.listener.getsockname()
                return {"at": f"{host}:{port}"}
        try:
            return in_child(lambda stage: self._measure(order, stage), order["seconds"], self.wire)
        finally:
            if self.listener is not None:
                self.listener.close()
            self.listener = None

    def _measure(self, order: Message, stage: Stage) -> Message:
        """Does, in the child, what may hang."""
        local = self.local_rank
        listener = self.listener if order.get("rank") == 0 else None
        match order["do"]:
            case "versions":
                found = measure.measure_versions(order["config"], order["torch"])
                return {"versions": found, "interfaces": measure.measure_interfaces()}
            case "disk":
                places = measure.written_folders(order["folder"])
                size = order["num_bytes"]
                return {name: measure.measure_disk(place, size) for name, place in places.items()}
            case "device":
                return measure_device(local, stage) if order["torch"] else measure_cpu(stage)
            case "link" if order["torch"]:
                return network.through_group(order, listener, local, stage)
            case "link":
                return network.through_socket(order, listener, stage)
            case "reduce":
                return network.measure_all_reduce(order, listener, local, stage)
        return {"error": f"unknown order {order['do']}"}


def in_child(work: Callable[[Stage], Message], seconds: float, wire: Wire) -> Message:
    """Returns what `work` returns, or an `error` if it raised, crashed or timed out. A message from
    the conductor meanwhile means that the answer is no longer wanted."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        wire.close()
        _work(work, writing)
    os.close(writing)
    heard, is_over = _hear(reading, wire, time.monotonic() + seconds)
    os.close(reading)
    status = _bury(child, at_once=not is_over)
    last: Message = json.loads(heard[-1]) if heard else {"stage": "the start"}
    if "stage" not in last:
        return last
    if not is_over:
        return {"error": f"did not finish within {seconds:.0f} s, in {last['stage']}"}
    ended = f"was ended by {signal.Signals(status & 0x7F).name}" if status & 0x7F else "ended"
    return {"error": f"{ended} in {last['stage']}"}


def _work(work: Callable[[Stage], Message], writing: int) -> None:
    def tell(message: Message) -> None:
        os.write(writing, json.dumps(message).encode() + b"\n")

    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        tell(work(lambda words: tell({"stage": words})))
    except BaseException as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        tell({"error": first[:300]})
    finally:
        os._exit(0)


def _hear(reading: int, wire: Wire, deadline: float) -> tuple[list[bytes], bool]:
    """Returns the lines received, and whether the child has finished writing."""
    data = b""
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([reading, wire.socket.fileno()], [], [], left)
        if reading in ready:
            part = os.read(reading, 2**16)
            data += part
            if not part:
                return data.splitlines(), True
        elif ready:
            break
    return data.splitlines(), False


def _bury(child: int, at_once: bool) -> int:
    """Waits for the child, or ends it, and returns its wait status."""
    kill_at = time.monotonic() + (0.0 if at_once else BURIAL_SECONDS)
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found or time.monotonic() > kill_at + BURIAL_SECONDS:
            return status
        if time.monotonic() >= kill_at:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
