"""The tasks that have connected: sends orders to all of them at once, and decides how long each
check may take before a node that does not answer is given up.
"""

from __future__ import annotations

import queue
import resource
import secrets
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overland.cluster.preflight.judge import Place
from overland.cluster.preflight.network import TOKEN_BYTES
from overland.cluster.preflight.start import Started
from overland.cluster.wire import Message, Switchboard, Wire
from overland.errors import ClusterError
from overland.plugins import plugin
from overland.processes import allow_open_files

LOOK_SECONDS = 0.1
NUM_FILES = 256  # besides one connection per task

# How many seconds each phase may take before a late node counts as bad. Python imports take minutes
# from a file system that thousands of tasks read at once; creating a context, the first network
# connection and half a second per test take less.
LIMITS = {
    "start": 300.0,
    "clock": 60.0,
    "torch": 300.0,
    "versions": 30.0,
    "disk": 60.0,
    "device": 90.0,
    "listen": 30.0,
    "link": 45.0,
    "reduce": 120.0,
}
# How much longer the other half may take once half have answered: otherwise a node that hangs would
# cost the full limit of every phase.
PATIENCE = 30.0
GRACE = 5.0  # for a task to end a child that took too long, and to report it


@dataclass(eq=False)
class Task:
    node: str
    local: int
    wire: Wire
    has_accelerator: bool

    @property
    def place(self) -> Place:
        return self.node, self.local


class Crew:
    """All tasks. A task that does not answer is lost together with its node, which then gets no
    more orders."""

    def __init__(
        self,
        board: Switchboard,
        started: Started,
        nodes: Sequence[str] | int,
        tasks_per_node: int,
        progress: Phases,
    ) -> None:
        self.board, self.started, self.progress = board, started, progress
        self.nodes = [] if isinstance(nodes, int) else list(nodes)
        self.num_nodes = nodes if isinstance(nodes, int) else len(nodes)
        self.tasks_per_node = tasks_per_node
        self.tasks: dict[Wire, Task] = {}
        self.lost: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._strangers: set[str] = set()
        self._number = 0

    def alive(self) -> list[Task]:
        """Returns the tasks that still answer, by node and by local rank."""
        order = {node: place for place, node in enumerate(self.nodes)}
        here = [task for task in self.tasks.values() if task.node not in self.lost]
        return sorted(here, key=lambda task: (order[task.node], task.local))

    def first_on_each(self) -> list[Task]:
        return [task for task in self.alive() if task.local == 0]

    def gather(self) -> None:
        """Waits until every task has connected."""
        expected = self.num_nodes * self.tasks_per_node
        _allow_connections(expected)
        clock = _Clock(expected, LIMITS["start"], PATIENCE)
        self.progress.begin("start", expected)
        while not self._is_complete() and not clock.is_over(len(self.tasks)):
            is_over = self.started.is_over()  # checked first: its tasks may have connected before
            for task, message in self._take():
                if message is None:
                    self._lose(task.node, f"task {task.local} ended before its first order")
            for node, reason in self.started.ended().items():
                if node in self.nodes:
                    self.lost.setdefault(node, f"did not start: {reason}")
            self.progress.count(len(self.tasks))
            if is_over:
                break
        if not self.tasks:
            raise ClusterError(self._nobody_came(clock.elapsed()))
        for node in self.nodes:
            count = self._counts[node]
            if node not in self.lost and count < self.tasks_per_node:
                who = "did not start" if not count else f"only task {self._locals(node)} started"
                self.lost[node] = f"{who} within {clock.elapsed():.0f} s"
        for number in range(len(self.nodes), self.num_nodes):
            self.nodes.append(f"node {number + 1} of {self.num_nodes}")
            self.lost[self.nodes[-1]] = f"did not start within {clock.elapsed():.0f} s"

    def ask(
        self,
        orders: Mapping[Task, Message],
        what: str,
        seconds: float,
        patience: float | None = None,
    ) -> dict[Place, Message]:
        """Orders tasks to do something that takes at most so many seconds, and returns the answers
        that arrived in time; `patience` defaults to PATIENCE."""
        self._number += 1
        waiting = dict(orders)
        for task, order in orders.items():
            self._send(task, {**order, "seconds": seconds, "number": self._number})
        answers: dict[Place, Message] = {}
        limit = seconds + GRACE
        clock = _Clock(len(orders), limit, PATIENCE if patience is None else patience)
        while waiting and not clock.is_over(len(answers)):
            for task, message in self._take():
                if message is None:
                    self._lose(task.node, f"task {task.local} ended in {what}")
                elif message.pop("answer", None) == self._number and waiting.pop(task, None):
                    answers[task.place] = message
            waiting = {task: order for task, order in waiting.items() if task.node not in self.lost}
            self.progress.count(len(answers))
        for task in waiting:
            self._lose(task.node, f"no answer in {what} within {clock.elapsed():.0f} s")
        return dict(sorted(answers.items()))

    def ask_together(
        self, groups: Sequence[Sequence[Task]], order: Message, what: str, seconds: float
    ) -> dict[Place, Message]:
        """Orders the tasks of each group to do something together. The first of a group listens;
        all learn where, and a token that nobody else knows. They wait for one another, so none is
        given up before the time is over."""
        listen: dict[Task, Message] = {group[0]: {"do": "listen"} for group in groups}
        places = self.ask(listen, what, LIMITS["listen"])
        orders: dict[Task, Message] = {}
        for group in groups:
            at = places.get(group[0].place, {}).get("at")
            if at is None or any(task.node in self.lost for task in group):
                continue
            token = secrets.token_hex(TOKEN_BYTES // 2)
            meeting = {**order, "at": at, "token": token, "size": len(group)}
            orders |= {task: {**meeting, "rank": rank} for rank, task in enumerate(group)}
        return self.ask(orders, what, seconds, patience=seconds + GRACE)

    def dismiss(self) -> None:
        for task in self.tasks.values():
            self._send(task, {"do": "end"})

    def _take(self) -> list[tuple[Task, Message | None]]:
        """Returns new messages."""
        taken: list[tuple[Task, Message | None]] = []
        wait = LOOK_SECONDS
        while True:
            try:
                wire, message = self.board.inbox.get(timeout=wait)
            except queue.Empty:
                return taken
            wait = 0.0
            task = self.tasks.get(wire)
            if message is not None and "hello" in message:
                self._enlist(wire, message["hello"])
            elif task is not None and message is not None and "time" in message:
                self._send(task, {"time": time.time()})  # at once: a delay looks like clock skew
            elif task is not None:
                taken.append((task, message))

    def _enlist(self, wire: Wire, hello: Message) -> None:
        node = hello["node"]
        if node not in self.nodes:
            if len(self.nodes) == self.num_nodes:
                self._strangers.add(node)
                return
            self.nodes.append(node)
        task = Task(node, hello["local"], wire, hello["accelerator"])
        self.tasks[wire] = task
        self._counts[node] += 1
        self.started.step = self.started.step or hello["step"]

    def _send(self, task: Task, message: Message) -> None:
        try:
            task.wire.send(message)
        except OSError:
            return  # the inbox reports its end, now or later

    def _lose(self, node: str, reason: str) -> None:
        known = self.started.ended().get(node)
        self.lost.setdefault(node, f"{reason}: {known}" if known else reason)

    def _is_complete(self) -> bool:
        return len(self.nodes) == self.num_nodes and all(
            node in self.lost or self._counts[node] == self.tasks_per_node for node in self.nodes
        )

    def _locals(self, node: str) -> str:
        return ", ".join(str(task.local) for task in self.tasks.values() if task.node == node)

    def _nobody_came(self, seconds: float) -> str:
        words = self.started.last_words() or "there was no output"
        if self._strangers:
            words = f"tasks connected from other nodes: {', '.join(sorted(self._strangers))}"
        limit = "" if self.started.is_over() else f" within {seconds:.0f} s"
        return f"no task of the preflight started{limit}: {words}"


class _Clock:
    """A time limit for all. Once half have answered, the others get as long again, or `patience` if
    that is longer. So a node that hangs costs seconds, but a slow file system is waited for."""

    def __init__(self, num_expected: int, seconds: float, patience: float) -> None:
        self.start = time.monotonic()
        self.deadline = self.start + seconds
        self.half, self.patience = (num_expected + 1) // 2, patience

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def is_over(self, num_answered: int) -> bool:
        if num_answered >= self.half:
            self.half = 2**63
            more = max(self.elapsed(), self.patience)
            self.deadline = min(self.deadline, time.monotonic() + more)
        return time.monotonic() >= self.deadline


def _allow_connections(num_tasks: int) -> None:
    """Allows one open connection per task."""
    allow_open_files()
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_tasks + NUM_FILES
    if resource.RLIM_INFINITY != allowed < needed:
        raise ClusterError(
            f"{num_tasks} tasks need {needed} open files, but only {allowed} are allowed "
            "(ulimit -Hn); test fewer nodes at a time with --nodes"
        )


class Phases:
    """Shows progress: a live status line in a terminal, otherwise one line per phase."""

    def __init__(self) -> None:
        self._status: Any = None
        self._what, self._total = "", 0
        self._since = time.monotonic()
        if sys.stderr.isatty():
            self._status = plugin("streams").SafeConsole(stderr=True).status("preflight")
            self._status.start()

    def begin(self, what: str, total: int) -> None:
        self._end_phase()
        self._what, self._total, self._since = what, total, time.monotonic()
        self.count(0)

    def count(self, done: int) -> None:
        self._done = done
        if self._status is not None:
            self._status.update(f"preflight: {self._what}, {done} of {self._total}")

    def close(self) -> None:
        self._end_phase()
        if self._status is not None:
            self._status.stop()

    def _end_phase(self) -> None:
        if self._what and self._status is None:
            seconds = time.monotonic() - self._since
            words = f"preflight: {self._what}, {self._done} of {self._total} in {seconds:.1f} s"
            print(words, file=sys.stderr, flush=True)
        self._what = ""
