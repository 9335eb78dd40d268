"""What ended an attempt: told by the ranks that failed, by srun, and by who fell silent.

A rank that fails says so in one line of its output, which srun carries to the first node. When one
is lost all others fail too, a moment later, in whatever they shared with it: those are no causes.
"""

from __future__ import annotations

import errno
import json
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from overland.cluster.beat import node_name

SAYS = "overland says: "


class Kind(StrEnum):
    """In the order of blame: of several, the first is the cause."""

    NODE = "node lost"
    DEVICE = "device fault"
    MEMORY = "out of memory"
    DISK = "disk full"
    CONFIG = "config error"
    DATA = "data error"
    TRAINING = "training error"
    CODE = "code error"
    KILLED = "rank killed"
    HANG = "hang"
    TAKEN = "folder taken"
    UNKNOWN = "unknown"
    NETWORK = "network"
    STOPPED = "stopped"

    @property
    def is_final(self) -> bool:
        """Whether the same would happen again."""
        return self in (Kind.CONFIG, Kind.DATA, Kind.TRAINING, Kind.CODE)


@dataclass(frozen=True)
class Fault:
    kind: Kind
    what: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Said:
    """A rank's last words."""

    rank: int
    node: str
    kind: Kind
    what: str
    time: float
    step: int = 0


@dataclass(frozen=True)
class TaskEnd:
    """What srun says of tasks that did not end well."""

    node: str
    ranks: tuple[int, ...]
    how: str


# By the name of the class, so that nothing heavy is imported to compare with.
KIND_OF_ERROR = {
    "ConfigError": Kind.CONFIG,
    "DegreeError": Kind.CONFIG,
    "ModelError": Kind.CONFIG,
    "TakenError": Kind.TAKEN,
    "CheckpointError": Kind.TRAINING,
    "TrainingError": Kind.TRAINING,
    "DataError": Kind.DATA,
    "OutOfMemoryError": Kind.MEMORY,
    "MemoryError": Kind.MEMORY,
    "ClusterError": Kind.NETWORK,
    "DistBackendError": Kind.NETWORK,
    "DistNetworkError": Kind.NETWORK,
    "DistStoreError": Kind.NETWORK,
    "ConnectionError": Kind.NETWORK,
    "TimeoutError": Kind.NETWORK,
    "AcceleratorError": Kind.DEVICE,
}
# What libraries write, looked for before the class is asked. An assertion on a device is a mistake
# in the code, such as an index out of range; it comes as an error of the device.
SIGNATURES = [
    (Kind.DISK, r"No space left on device|Disk quota exceeded"),
    (Kind.MEMORY, r"out of memory|Cannot allocate memory|OOM|hipErrorOutOfMemory"),
    (Kind.CODE, r"device-side assert"),
    (
        Kind.DEVICE,
        r"(CUDA|HIP) error|uncorrectable|\bECC\b|\bXid\b|hardware error|cudaError|hipError"
        r"|illegal memory access|unspecified launch failure|CUBLAS_STATUS_EXECUTION_FAILED",
    ),
    (
        Kind.NETWORK,
        r"\bNCCL\b|\bRCCL\b|ProcessGroup|\bgloo\b|[Cc]onnection (closed|reset|refused)"
        r"|Broken pipe|Socket [Tt]imeout|Timed out waiting|libfabric|TCPStore|recvValue|sendBytes",
    ),
]
KILLED = r"Killed|Segmentation fault|Aborted|Bus error|Illegal instruction|Floating point exception"


def kind_of(error: BaseException) -> Kind:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Kind.DISK
    names = [kind.__name__ for kind in type(error).__mro__]
    ours = next((KIND_OF_ERROR[name] for name in names if name in KIND_OF_ERROR), None)
    for kind, pattern in SIGNATURES:
        is_clear = ours is Kind.TAKEN or (ours is not None and ours.is_final)
        if re.search(pattern, text) and (kind is Kind.DISK or not is_clear):
            return kind
    if ours is not None:
        return ours
    return Kind.UNKNOWN if isinstance(error, OSError) else Kind.CODE


def say(rank: int, kind: Kind, what: str, step: int = 0) -> None:
    """A rank's last words, for whoever reads its output."""
    said = Said(rank, node_name(), kind, " ".join(what.split())[:500], time.time(), step)
    print(f"\n{SAYS}{json.dumps(asdict(said))}", flush=True)


@dataclass
class Findings:
    """All that is known of an attempt that ended."""

    said: list[Said] = field(default_factory=list)
    ends: list[TaskEnd] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Nodes that fell silent, or that Slurm calls failed."""
    hang: Fault | None = None
    last_lines: list[str] = field(default_factory=list)

    def read(self, line: str) -> bool:
        """Takes a line of srun's output in; returns whether it is for our eyes only."""
        told = line.find(SAYS)
        if told >= 0:
            try:
                words = json.loads(line[told + len(SAYS) :])
                self.said.append(Said(**{**words, "kind": Kind(words["kind"])}))
                return True
            except (ValueError, TypeError):
                return False
        if found := re.match(r"srun: error: Node failure on (\S+)", line):
            self.lost.append(found[1])
        elif found := re.match(r"srun: error: ([\w.-]+): tasks? ([\d,-]+): (.+)", line):
            how = _signal_of_shell(found[3].strip())
            self.ends.append(TaskEnd(found[1], expand_ranks(found[2]), how))
        elif line.strip():
            self.last_lines = [*self.last_lines[-39:], line]
        return False

    @property
    def step(self) -> int:
        """The last one that a rank says it has done. Signs of life come once a second: this is
        nearer to the end."""
        return max((said.step for said in self.said), default=0)

    def stopped(self) -> bool:
        """Asked to, and saved. srun's exit code does not tell: it is 0 after a lost node too."""
        return bool(self.said) and all(said.kind is Kind.STOPPED for said in self.said)

    def fault(self) -> Fault:
        """The cause."""
        if self.lost:
            nodes = tuple(dict.fromkeys(self.lost))
            return Fault(Kind.NODE, f"{', '.join(nodes)} fell silent", nodes=nodes)
        if self.hang is not None:
            return self.hang
        causes = [*self._said_causes(), *self._seen_causes()]
        order = list(Kind)
        return min(causes, key=lambda fault: order.index(fault.kind), default=self._unexplained())

    def _said_causes(self) -> list[Fault]:
        """Of each kind, who said so first."""
        first: dict[Kind, Said] = {}
        for said in sorted(self.said, key=lambda said: said.time):
            first.setdefault(said.kind, said)
        faults = []
        for kind, said in first.items():
            what = f"rank {said.rank} on {said.node}: {said.what}"
            if kind is Kind.NETWORK:  # whoever notices it first may be the most innocent
                faults.append(Fault(kind, what))
            elif kind is not Kind.STOPPED:
                faults.append(Fault(kind, what, (said.rank,), (said.node,)))
        return faults

    def _seen_causes(self) -> list[Fault]:
        """Of tasks that said nothing. Those ended by srun, since another had failed, come as
        Terminated, or killed after that one."""
        spoke = {said.rank for said in self.said}
        for end in self.ends:
            ranks = tuple(rank for rank in end.ranks if rank not in spoke)
            who = f"{name_ranks(end.ranks)} on {end.node}"
            if "Out Of Memory" in end.how:
                return [Fault(Kind.MEMORY, f"{who}: the node's memory", end.ranks, (end.node,))]
            if not ranks or "Terminated" in end.how:
                continue
            if re.search(KILLED, end.how):
                return [Fault(Kind.KILLED, f"{who}: {end.how}", ranks, (end.node,))]
            if "exit code 2" in end.how:  # a sentence was printed before the ranks met
                return [Fault(Kind.CONFIG, f"{who}: {self._last_words(ranks)}", ranks)]
            if "exit code" in end.how:
                kind = Kind.CODE if self._has_trace(ranks) else Kind.UNKNOWN
                return [Fault(kind, f"{who}: {self._last_words(ranks)}", ranks, (end.node,))]
        return []

    def _lines_of(self, ranks: Sequence[int]) -> list[str]:
        return [
            line.partition(":")[2].strip()
            for line in self.last_lines
            if line.partition(":")[0].strip().isdecimal() and int(line.partition(":")[0]) in ranks
        ]

    def _has_trace(self, ranks: Sequence[int]) -> bool:
        return any(line.startswith("Traceback") for line in self._lines_of(ranks))

    def _last_words(self, ranks: Sequence[int]) -> str:
        return (self._lines_of(ranks) or ["it said nothing"])[-1]

    def _unexplained(self) -> Fault:
        words = self.last_lines[-1] if self.last_lines else "srun said nothing"
        return Fault(Kind.UNKNOWN, f"the ranks ended, and none said why: {words}")


def _signal_of_shell(how: str) -> str:
    """A shell around a rank tells its end by a signal as 128 more than that."""
    found = re.search(r"exit code (\d+)", how)
    number = int(found[1]) - 128 if found else 0
    if number not in {s.value for s in signal.Signals}:
        return how
    return signal.strsignal(number) or how


def expand_ranks(text: str) -> tuple[int, ...]:
    """`0-2,7` as numbers."""
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        ranks.extend(range(int(first), int(last or first) + 1))
    return tuple(ranks)


def name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{' …' if len(ranks) > 8 else ''}"
