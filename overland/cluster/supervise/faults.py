"""Decides what ended an attempt (a stop, or which failure, on which ranks and nodes), from reports
of failed ranks, srun's output, and silent nodes.

When a rank is lost, all others fail a moment later in whatever they shared with it; those failures
are not causes.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from overland.errors import ClusterError, Kind
from overland.slurm import expand_hosts
from overland.words import name_ranks
from overland.world.flight_recorder import Wait
from overland.world.signals import ENDED, SAYS, Said

KILLED = r"Killed|Segmentation fault|Aborted|Bus error|Illegal instruction|Floating point exception"
HARDWARE = r"uncorrectable|\bECC\b|\bXid\b|hardware error"
NCCL_TIMEOUT = "Watchdog caught collective operation timeout"
TIMED_OUT = "a collective timed out"
LINES_KEPT = 40  # of each rank


@dataclass(frozen=True)
class Fault:
    kind: Kind
    what: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    place: str = ""
    """Where in the program, to distinguish the same error from another of its kind."""


@dataclass(frozen=True)
class TaskEnd:
    """What srun reports about tasks that did not exit cleanly."""

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    how: str


@dataclass
class Findings:
    """Everything known about an attempt that ended."""

    num_nodes: int = 0
    said: list[Said] = field(default_factory=list)
    ends: list[TaskEnd] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Nodes that fell silent, or that Slurm reports as failed."""
    hang: Fault | None = None
    ended: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Ranks that exited with code 0, with their node and the time that this was reported."""
    gone: dict[int, str] = field(default_factory=dict)
    """Ranks that ended during training before any error was reported, with their node."""
    first_word: float | None = None
    """When a rank, or srun about a rank, first reported a failure."""
    is_closed: bool = False
    """The supervisor is ending the ranks, so whatever happens to them now is its own doing."""
    last_line: str = ""
    _lines: dict[int, deque[str]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=LINES_KEPT))
    )
    _timed_out: bool = False

    def read(self, line: str) -> bool:
        """Parses a line of srun's output; returns whether it is internal and not for the log."""
        told = line.find(SAYS)
        if told >= 0:
            try:
                words = json.loads(line[told + len(SAYS) :])
                said = Said(**{**words, "kind": Kind(words["kind"])})
            except (ValueError, TypeError):
                return False
            self.said.append(said)
            if said.kind is not Kind.STOPPED:
                self._note_word()
            return True
        if found := re.match(rf"\s*(\d+): {ENDED}(\S+)$", line.rstrip()):
            self.ended.setdefault(int(found[1]), (found[2], time.monotonic()))
            return True
        self._timed_out |= NCCL_TIMEOUT in line
        if found := re.match(
            r"srun: error: (?:Node failure on (\S+)|Task launch for \S+ failed on node ([^\s:]+):)",
            line,
        ):
            self.lost.extend(hosts(found[1] or found[2]))
        elif found := re.match(r"srun: error: (\S+): tasks? ([\d,-]+): (.+)", line):
            ranks = tuple(map(int, expand_hosts(f"[{found[2]}]")))
            how = _signal_of_shell(found[3].strip())
            self._note_end(TaskEnd(hosts(found[1]), ranks, how))
        elif found := re.match(r"\s*(\d+): (.*\S)", line):
            self._lines[int(found[1])].append(found[2])
        elif line.strip():
            self.last_line = line.strip()
        return False

    def _note_word(self) -> None:
        if self.first_word is None:
            self.first_word = time.monotonic()

    def _note_end(self, end: TaskEnd) -> None:
        """Notes how tasks ended. Ranks that the supervisor ends itself are ignored, except for
        those that were gone before: srun may report them late."""
        if self.is_closed:
            nodes = tuple(dict.fromkeys(self.gone[r] for r in end.ranks if r in self.gone))
            end = TaskEnd(nodes, tuple(r for r in end.ranks if r in self.gone), end.how)
        else:
            self._note_word()
        if end.ranks:
            self.ends.append(end)

    @property
    def step(self) -> int:
        """The last step that a failed rank reports. It is more recent than heartbeats, which come
        once a second."""
        return max((said.step for said in self.said), default=0)

    def stopped(self) -> bool:
        """Whether all ranks were asked to stop, and saved. srun's exit code does not show it, since
        it is 0 after a lost node too. Nor do ranks that stopped before their first step: when
        another rank was killed, they take srun's SIGTERM as a request to stop."""
        all_did = bool(self.said) and all(said.kind is Kind.STOPPED for said in self.said)
        return all_did and not self.lost and not self._seen_causes()

    def fault(self) -> Fault:
        """Returns the cause. What ranks and srun report takes precedence over what is only
        concluded from silence."""
        said = self._said_causes()
        told = {node for cause in said for node in cause.nodes}
        nodes = tuple(node for node in dict.fromkeys(self.lost) if node not in told)
        if nodes:
            if len(nodes) > 1 and 2 * len(nodes) > self.num_nodes:
                return Fault(Kind.NETWORK, f"{len(nodes)} of {self.num_nodes} nodes fell silent")
            return Fault(Kind.NODE, f"{', '.join(nodes)} fell silent", nodes=nodes)
        hang = [self.hang] if self.hang else []
        causes = [*said, *self._seen_causes(), *self._gone_causes(), *hang]
        if not causes:
            words = self.last_line or "no output from srun"
            return Fault(Kind.UNKNOWN, f"the ranks ended without reporting an error: {words}")
        order = list(Kind)
        return min(causes, key=lambda fault: order.index(fault.kind))

    def _said_causes(self) -> list[Fault]:
        """Returns the first report of each kind. An error on several nodes is not blamed on one."""
        by_kind: dict[Kind, list[Said]] = {}
        for said in sorted(self.said, key=lambda said: said.time):
            by_kind.setdefault(said.kind, []).append(said)
        faults = []
        for kind, all_said in by_kind.items():
            first = all_said[0]
            what = f"rank {first.rank} on {first.node}: {first.what}"
            alike = {said.node for said in all_said if said.place == first.place}
            nodes = tuple(alike) if len(alike) == 1 else ()
            if kind in (Kind.NETWORK, Kind.TAKEN):  # the rank that notices is rarely the cause
                faults.append(Fault(kind, what))
            elif kind is not Kind.STOPPED:
                place = first.place if kind is not Kind.DISK else ""  # any later write fails too
                if kind in (Kind.DEVICE, Kind.MEMORY) and nodes:
                    place = f"rank {first.rank}: {place}"  # another rank has another device
                faults.append(Fault(kind, what, (first.rank,), nodes, place))
        return faults

    def _seen_causes(self) -> list[Fault]:
        """Returns the first task that failed without reporting an error. Once a task that reported
        one has ended, srun ends the others, with SIGTERM and then SIGKILL."""
        spoke = {said.rank for said in self.said if said.kind is not Kind.STOPPED}
        for end in self.ends:
            who = f"{name_ranks(end.ranks)} on {', '.join(end.nodes)}"
            nodes = end.nodes if len(end.nodes) == 1 else ()
            if "Out Of Memory" in end.how:
                return [Fault(Kind.MEMORY, f"{who}: the node ran out of memory", end.ranks, nodes)]
            if spoke & set(end.ranks):
                return []
            if "Terminated" in end.how:
                continue
            if self._timed_out and "Aborted" in end.how:  # NCCL's watchdog aborts waiting ranks
                return [Fault(Kind.HANG, f"{TIMED_OUT}; {who}: {end.how}")]
            if re.search(KILLED, end.how):
                # SIGKILL comes from outside the program; other signals come from its own actions.
                place = "" if "Killed" in end.how else f"{name_ranks(end.ranks)}: {end.how}"
                return [Fault(Kind.KILLED, f"{who}: {end.how}", end.ranks, nodes, place)]
            if "exit code" in end.how:
                lines = [line for rank in end.ranks for line in self._lines.get(rank, [])]
                kind = Kind.UNKNOWN
                if any("Traceback" in line for line in lines):
                    kind = Kind.CODE
                if re.search(r"exit code 2\b", end.how):  # a user error before rendezvous
                    kind = Kind.CONFIG
                place = lines[-1] if lines else ""
                return [Fault(kind, f"{who}: {place or 'no output'}", end.ranks, nodes, place)]
        return []

    def _gone_causes(self) -> list[Fault]:
        """Returns ranks that are gone without any reported reason."""
        if not self.gone:
            return []
        ranks, nodes = tuple(sorted(self.gone)), tuple(dict.fromkeys(self.gone.values()))
        how = "ended with exit code 0" if ranks[0] in self.ended else "is gone"
        what = f"{name_ranks(ranks)} on {', '.join(nodes)} {how} without reporting an error"
        return [Fault(Kind.UNKNOWN, what, ranks, nodes, f"{name_ranks(ranks)} {how}")]


def with_recorded_ranks(fault: Fault, wait: Wait | None, nodes: Mapping[int, str]) -> Fault:
    """Returns a hang with the ranks that the others waited for according to NCCL's flight recorder,
    unless heartbeats or stacks have named some. `nodes`: the node of each rank."""
    if fault.kind is not Kind.HANG or wait is None or fault.ranks:
        return fault
    where = tuple(dict.fromkeys(nodes[rank] for rank in wait.missing if rank in nodes))
    blamed = where if len(where) == 1 else ()
    on = f" (on {', '.join(where)})" if where else ""
    return replace(fault, what=f"{TIMED_OUT}: {wait.words}{on}", ranks=wait.missing, nodes=blamed)


def hosts(text: str) -> tuple[str, ...]:
    try:
        return tuple(expand_hosts(text))
    except ClusterError:
        return (text,)


def _signal_of_shell(how: str) -> str:
    """Translates the exit code of the shell around a rank, which is 128 + N if signal N ended the
    rank."""
    found = re.search(r"exit code (\d+)", how)
    number = int(found[1]) - 128 if found else 0
    if number not in {s.value for s in signal.Signals}:
        return how
    return signal.strsignal(number) or how
