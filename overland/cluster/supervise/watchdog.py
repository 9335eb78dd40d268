"""Judges the ranks' heartbeats: which ranks hang, by time limits that it learns, which nodes are
silent, and which ranks are stragglers or stall in a save.

The time limit of a phase is learned: ten times the longest it has taken so far, and at least
`health.hang_seconds`. The first steps of an attempt do not count, and may take long: weights are
read, blocks are compiled, connections are made.

While ranks wait for the disk, bytes count instead: a save or a load may take as long as it needs,
and is considered hung when a rank has moved no bytes for `health.hang_seconds`.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from overland.cluster.supervise.faults import Fault
from overland.errors import Kind
from overland.processes import STOPPED_STATES
from overland.words import name_ranks
from overland.world.heartbeat import Phase, Transfer, behind

FACTOR = 10.0
FIRST_TIME_SECONDS = 1800.0
UNTYPICAL_STEPS = 2
SILENT_SECONDS = 15.0
ADVANCING_SECONDS = 5.0  # training may have stopped if no step follows within this time, at least
LATEST_START_SECONDS = 120.0  # a node not heard from after this, and 5 × the median start, is lost
GONE_SECONDS = 10.0  # from the end of a rank until its error report, or srun's, arrives here
SLOW = 1.5  # × the median of all ranks
SLOW_READINGS = 5
LEARNED = (Phase.DATA, Phase.COMPUTING, Phase.REPORTING, Phase.VALIDATING)
AT_DISK = (Phase.LOADING, Phase.SAVING, Phase.ENDING)  # phases in which ranks may wait for the disk
MOST_TO_BLAME = 2  # nodes; if more stand out, it is because of the parallel layout
LATE_DATA = 0.2  # share of time spent waiting for data, above the median rank


@dataclass
class Heard:
    """The last known state of a rank."""

    rank: int
    node: str
    step: int = 0
    phase: Phase = Phase.STARTING
    age: float = 0.0
    probe_seconds: float = 0.0
    data_wait: float = 0.0
    state: str = "R"
    transfer: Transfer = Transfer.NONE
    quiet: float = 0.0
    """Seconds since it last moved a byte to or from the disk."""
    num_bytes: int = 0
    total_bytes: int = 0
    slow_readings: int = 0
    has_new_reading: bool = False

    @property
    def place(self) -> tuple[int, Phase]:
        """The rank's progress: of two ranks, the one with the smaller place is behind."""
        return self.step, self.phase

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped its process."""
        return self.state in STOPPED_STATES

    @property
    def is_moving(self) -> bool:
        """Whether it is (or should be) moving bytes to or from the disk."""
        return self.transfer is Transfer.MOVING

    @property
    def is_over(self) -> bool:
        return self.phase >= Phase.STOPPED


@dataclass
class Watchdog:
    hang_seconds: float
    nodes: Sequence[str]
    started: float
    ranks: dict[int, Heard] = field(default_factory=dict)
    stepped: float | None = None
    """When the last step was first reported."""
    _longest: dict[Phase, float] = field(default_factory=dict)
    _step_times: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    _called: dict[str, float] = field(default_factory=dict)
    _heard: dict[str, float] = field(default_factory=dict)
    _named_slow: set[int] = field(default_factory=set)
    _gone: dict[int, float] = field(default_factory=dict)
    _named_stalled: set[int] = field(default_factory=set)
    _first_step: int | None = None

    def call(self, node: str, now: float) -> None:
        """Notes that the agent of a node has connected or reconnected."""
        self._called.setdefault(node, now - self.started)
        self._heard[node] = now

    def hear(self, node: str, beats: Sequence[Sequence[float | str]], now: float) -> None:
        self._heard[node] = now
        before = self.step
        for rank, step, phase, age, probe, wait, state, transfer, quiet, moved, total in beats:
            known = self.ranks.setdefault(int(rank), Heard(int(rank), node))
            place = int(step), Phase(int(phase))
            if place != known.place:
                self._learn(known)
            known.step, known.phase = place
            known.age, known.state = float(age), str(state)
            if float(probe) != known.probe_seconds:
                known.probe_seconds, known.has_new_reading = float(probe), True
            known.data_wait = float(wait)
            known.transfer, known.quiet = Transfer(int(transfer)), float(quiet)
            known.num_bytes, known.total_bytes = int(moved), int(total)
        if self.step > before:
            if self.stepped is not None:
                self._step_times.append((now - self.stepped) / (self.step - before))
            self.stepped = now

    @property
    def step(self) -> int:
        """The last step that any rank has completed; ranks advance together."""
        return max((rank.step for rank in self.ranks.values()), default=0)

    @property
    def phase(self) -> Phase:
        return min((rank.phase for rank in self.ranks.values()), default=Phase.STARTING)

    def limit(self, phase: Phase) -> float:
        if phase is Phase.SAVING:  # apart from the disk, a save takes no longer than a step
            phase = Phase.COMPUTING
        if phase not in self._longest or phase not in LEARNED:
            return max(FIRST_TIME_SECONDS, self.hang_seconds)
        return max(self.hang_seconds, FACTOR * self._longest[phase])

    def forgive(self, now: float) -> None:
        """Resets all clocks after the supervisor was paused, since it missed messages."""
        self._heard = dict.fromkeys(self._heard, now)

    def all_have_ended(self) -> bool:
        """Whether all ranks ended more than two minutes ago; srun may not have noticed."""
        ended = [r.phase >= Phase.STOPPED and r.age > 120 for r in self.ranks.values()]
        return bool(ended) and all(ended)

    def silent_nodes(self, now: float) -> list[str]:
        """Returns nodes that have fallen silent, or never connected although most others did."""
        silent = [node for node, last in self._heard.items() if now - last > SILENT_SECONDS]
        if 2 * len(self._called) > len(self.nodes):
            usual = statistics.median(self._called.values())
            if now - self.started > max(LATEST_START_SECONDS, 5 * usual):
                silent += [node for node in self.nodes if node not in self._called]
        return silent

    def quiet_nodes(self, since: float) -> list[str]:
        """Returns nodes last heard from before that time."""
        return [node for node, last in self._heard.items() if last < since]

    def gone_ranks(self, now: float) -> dict[int, float]:
        """Returns ranks whose process disappeared before the end of training, with the time that
        this was noticed."""
        gone = [r.rank for r in self.ranks.values() if not r.state and r.phase < Phase.ENDING]
        self._gone = {rank: self._gone.get(rank, now) for rank in gone}
        return self._gone

    def any_rank_waits_for(self, gone: Collection[int]) -> bool:
        """Whether any rank is waiting for these. At the end of training some ranks exit before
        others, but none waits."""
        return any(
            rank.phase < Phase.ENDING and rank.age > GONE_SECONDS and rank.state
            for rank in self.ranks.values()
            if rank.rank not in gone
        )

    def is_advancing(self, now: float) -> bool:
        """Whether training seems to advance: the next step may take twice as long as usual."""
        if self.stepped is None:
            return False
        usual = statistics.median(self._step_times) if self._step_times else 0.0
        return now - self.stepped <= max(ADVANCING_SECONDS, 2 * usual)

    def late_ranks(self) -> list[Heard]:
        """Returns ranks that have exceeded the time limit of their phase. A process stopped by a
        signal never resumes by itself, whatever its phase."""
        is_moving = any(rank.is_moving and not self._is_stuck(rank) for rank in self.ranks.values())
        return [
            rank
            for rank in self.ranks.values()
            if not rank.is_over and self._is_late(rank, is_moving)
        ]

    def _is_late(self, rank: Heard, is_moving: bool) -> bool:
        if rank.is_stopped:
            return rank.age > self.hang_seconds
        if rank.phase in AT_DISK and rank.is_moving:
            return self._is_stuck(rank)
        if rank.phase in AT_DISK and is_moving:  # it waits for a rank that is moving bytes
            return False
        idle = min(rank.age, rank.quiet) if rank.transfer is Transfer.WAITING else rank.age
        return idle > self.limit(rank.phase)

    def _is_stuck(self, rank: Heard) -> bool:
        return rank.is_moving and rank.quiet > self.hang_seconds

    def stalled_ranks(self) -> list[Heard]:
        """Returns ranks whose save has newly stalled while training continues."""
        stuck = [rank for rank in self.ranks.values() if self._is_stuck(rank)]
        new = [rank for rank in stuck if rank.rank not in self._named_stalled]
        self._named_stalled = {rank.rank for rank in stuck}
        return new

    def hang(self, late: Sequence[Heard], odd: Sequence[int] = ()) -> Fault:
        """Returns the fault, which names the rank that the others wait for: one whose process is
        stopped; else one that moves no bytes while others do; else one that is behind; else one
        whose stack differs (`odd`)."""
        stopped = [rank for rank in late if rank.is_stopped]
        stuck = [rank for rank in late if self._is_stuck(rank)]
        if len(stuck) == len(self.ranks):  # the file system responds to no one
            odd, behind = (), []
        else:
            behind = stuck or self._behind()
        named = stopped or behind or [self.ranks[rank] for rank in odd if rank in self.ranks]
        if not 0 < len({rank.node for rank in named}) <= MOST_TO_BLAME:
            slowest = max(late, key=lambda rank: rank.age)
            what = (
                f"no rank has made progress for {slowest.age:.0f} s at step {slowest.step} "
                f"({slowest.phase.words}), and none stands out; all stacks were saved"
            )
            if stuck:
                most = max(stuck, key=lambda rank: rank.quiet)
                what = (
                    f"{len(stuck)} of {len(self.ranks)} ranks have moved no bytes for "
                    f"{most.quiet:.0f} s at step {most.step} ({most.phase.words}): the file "
                    f"system is not responding"
                )
            return Fault(Kind.HANG, what)
        first = named[0]
        how = "stopped" if first.is_stopped else "hung"
        what = (
            f"{name_ranks([rank.rank for rank in named])} on "
            f"{', '.join(dict.fromkeys(rank.node for rank in named))} {how} at step {first.step}, "
            f"{first.phase.words}, for {first.age:.0f} s"
        )
        if stuck and not stopped:
            what += f", with no bytes moved for {first.quiet:.0f} s"
        ranks = tuple(rank.rank for rank in named)
        return Fault(Kind.HANG, what, ranks, tuple(dict.fromkeys(rank.node for rank in named)))

    def transfer(self) -> dict[str, float] | None:
        """Returns the progress of a save or load over all ranks, or None if there is none."""
        at_it = [rank for rank in self.ranks.values() if rank.transfer is not Transfer.NONE]
        if not at_it:
            return None
        moving = [rank.quiet for rank in at_it if rank.is_moving]
        return {
            "bytes": sum(rank.num_bytes for rank in at_it),
            "total_bytes": sum(rank.total_bytes for rank in at_it),
            "quiet_seconds": round(max(moving, default=0.0), 1),
        }

    def stragglers(self) -> list[tuple[Heard, float, str]]:
        """Returns ranks that have newly become slow, each with the factor and a description."""
        found = []
        usual, usual_wait = self._median("probe_seconds"), self._median("data_wait")
        for rank in self.ranks.values():
            factor = rank.probe_seconds / usual if usual > 0 else 1.0
            if rank.has_new_reading:
                rank.slow_readings = rank.slow_readings + 1 if factor > SLOW else 0
                rank.has_new_reading = False
            is_slow = rank.slow_readings >= SLOW_READINGS
            waits = rank.data_wait - usual_wait
            if (is_slow or waits > LATE_DATA) and rank.rank not in self._named_slow:
                self._named_slow.add(rank.rank)
                what = (
                    f"takes {factor:.1f} × as long to compute as the median rank"
                    if is_slow
                    else f"spends {rank.data_wait:.0%} of its time waiting for data; the median is "
                    f"{usual_wait:.0%}"
                )
                found.append((rank, factor, what))
            elif not is_slow and waits <= LATE_DATA:
                self._named_slow.discard(rank.rank)
        return found

    def slowest(self) -> dict[str, str | float] | None:
        """Returns the rank that takes the longest to compute, as a factor of the median rank."""
        slowest = max(self.ranks.values(), key=lambda rank: rank.probe_seconds, default=None)
        if slowest is None or not slowest.probe_seconds:
            return None
        factor = slowest.probe_seconds / (self._median("probe_seconds") or slowest.probe_seconds)
        return {"rank": slowest.rank, "node": slowest.node, "factor": round(factor, 2)}

    def _learn(self, rank: Heard) -> None:
        """Records how long a rank's phase took, now that it has moved on."""
        if rank.phase < Phase.DATA:
            return
        if self._first_step is None:
            self._first_step = rank.step
        if rank.step >= self._first_step + UNTYPICAL_STEPS:
            self._longest[rank.phase] = max(self._longest.get(rank.phase, 0.0), rank.age)

    def _median(self, what: str) -> float:
        values = [getattr(rank, what) for rank in self.ranks.values()]
        return statistics.median(values) if values else 0.0

    def _behind(self) -> list[Heard]:
        """Returns the ranks that are furthest behind, if they are fewer than half of all."""
        found = behind({rank.rank: rank.place for rank in self.ranks.values()})
        return [self.ranks[rank] for rank in found if not self.ranks[rank].is_over]
