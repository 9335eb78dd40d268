"""Reads the sessions and events of a run, from sessions.jsonl and the supervisor's attempts.jsonl,
and counts where their time went: goodput, lost steps, waits.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overland.apps.report.lines import Lines, Numbers
from overland.cluster.supervise.events import Event, Events, Tail, parse_event
from overland.run_folder import SESSIONS

ENDED = ("finished", "stopped", "failed", "killed", "running")
STOPPING = re.compile(r"^stopping after step \d+: ")
LARGEST_TIME = 1e11
IN_LOOP = ("compute", "data", "validation", "save")
Mask = npt.NDArray[np.bool_]
PARTS = {
    "compute": "computing steps that count",
    "data": "waiting for data",
    "validation": "validation",
    "save": "saving",
    "start": "starting",
    "lost": "lost steps",
    "end": "shutdown and unknown",
}


@dataclass
class ReportedSession:
    """The ranks from one start to their end."""

    number: int
    begun: float
    started: float
    """When it was ready for its first step."""
    step: int
    """The step that it resumed from."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The hardware and software it ran on."""
    last_step: int = 0
    """The furthest step that it reached."""
    ended: float = 0.0
    how: str = "killed"
    """One of ENDED; "killed" if no end was recorded."""
    what: str = ""
    final_step: int = 0
    """The step that it ended at, which is earlier than last_step if it rewound after a spike."""
    kept_step: int = 0
    """The last of its steps that became part of the model."""
    rewound: list[tuple[float, int]] = field(default_factory=list)
    """When it rewound after a loss spike, and to which step."""
    rewound_steps: int = 0
    """Steps lost by rewinding."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How its time was used, as far as is known."""
    kept_seconds: dict[str, float] = field(default_factory=dict)
    """How its time was used until `kept_step`."""

    @property
    def lost_steps(self) -> int:
        return max(0, self.final_step - self.kept_step) + self.rewound_steps


@dataclass(frozen=True)
class Happening:
    """An event in a run's timeline."""

    time: float
    kind: str
    step: int | None
    what: str


@dataclass(frozen=True)
class Logged:
    """The time, step and seconds by use of each logged line, kept or lost."""

    uses: list[str]
    times: Numbers
    table: Numbers
    num_kept: int
    """Lines that count; they come first."""

    @classmethod
    def of(cls, lines: Lines) -> Logged:
        both = (lines.logged, lines.lost)
        names = {name for columns in both for name in columns.names}
        uses = sorted(
            name.removeprefix("seconds/") for name in names if name.startswith("seconds/")
        )
        tables = [
            np.stack([columns.steps, *(columns[f"seconds/{use}"] for use in uses)], axis=1)
            for columns in both
        ]
        times = np.concatenate([columns["time"] for columns in both])
        return cls(uses, times, np.concatenate(tables), len(lines.logged))

    def sessions_of(self, sessions: Sequence[ReportedSession]) -> npt.NDArray[np.int64]:
        """Returns the number of the session that logged each line. A step that counts belongs to
        the last session that resumed from before it, whatever its clock said; lost steps are
        assigned by their time."""
        steps = self.table[:, 0]
        begun = np.array([one.begun for one in sessions])
        found = np.searchsorted(np.maximum.accumulate(begun), self.times, side="right")
        found[~np.isfinite(self.times)] = 0
        for session in sessions:
            found[: self.num_kept][steps[: self.num_kept] > session.step] = session.number
        return found


def with_borders(sessions: Sequence[ReportedSession]) -> Iterator[tuple[ReportedSession, float]]:
    """Yields each session with the start time of the next one."""
    for number, session in enumerate(sessions, 1):
        yield session, sessions[number].begun if number < len(sessions) else np.inf


class RunStory:
    """Sessions and events, read incrementally as they are appended."""

    def __init__(self, run: Path) -> None:
        self._tail, self._events = Tail(run / SESSIONS), Events(run)
        self._lines: list[Event] = []

    def read_on(self) -> None:
        self._events.read_on()
        for lines, _, is_other in self._tail.chunks():
            if is_other:
                self._lines.clear()
            events = map(parse_event, lines)
            self._lines += [one for one in events if one is not None and _time(one)]

    def sessions(self, lines: Lines, is_alive: bool) -> list[ReportedSession]:
        """Returns all sessions in order; the last one is still running if the run `is_alive`."""
        told = self._by_session()
        found = [_session(number, own[0]) for number, own in enumerate(told, 1)]
        logged = Logged.of(lines)
        logged_by = logged.sessions_of(found)
        resumed_from = [*(later.step for later in found[1:]), np.inf]
        for (session, border), own, step in zip(
            with_borders(found), told, resumed_from, strict=False
        ):
            mine = logged_by == session.number
            _end(session, own, logged, mine)
            self._blame(session, border)
            session.kept_step = int(min(session.final_step, step))
            _count_seconds(session, logged, mine)
        if found and is_alive and found[-1].how == "killed":
            found[-1].how = "running"
        return found

    def _by_session(self) -> list[list[Event]]:
        """Groups the lines by session, by their order in the file rather than by clock."""
        found: list[list[Event]] = []
        for one in self._lines:
            if one["event"] == "start":
                found.append([])
            if found:
                found[-1].append(one)
        return found

    def _blame(self, session: ReportedSession, border: float) -> None:
        """Adds the supervisor's reason to a session that did not record its own end."""
        for fault in self._events.all:
            time = _time(fault)
            if fault["event"] in ("fault", "signal") and session.begun <= time < border:
                words = (str(fault.get(name) or "") for name in ("kind", "what"))
                session.what = session.what or ": ".join(word for word in words if word)
                session.ended = max(session.ended, time)

    def happenings(self, sessions: Sequence[ReportedSession]) -> list[Happening]:
        """Returns the events that a timeline shows in addition to the sessions, in order."""
        found = []
        for one in self._lines:
            what, step = str(one.get("what") or ""), _step(one)
            if one["event"] == "save":
                step = one["saved"] if isinstance(one.get("saved"), int) else step
                seconds = numbers(one)
                what = f"step {step:,} saved in {seconds.get('seconds', 0):.1f} s, of which "
                what += f"training waited {seconds.get('waited', 0):.1f} s"
            elif one["event"] == "rewind":
                what = f"rewound to step {step:,} after a loss spike"
            elif one["event"] != "message":
                continue
            found.append(Happening(one["time"], one["event"], step, what))
        for event in self._events.all:
            if event["event"] in ("fault", "preflight", "straggler", "stall", "recovered", "agent"):
                found.append(Happening(_time(event), event["event"], _step(event), in_words(event)))
        for session in sessions:
            if session.how in ("killed", "failed"):
                what = session.what or "ended without a recorded reason"
                found.append(Happening(session.ended, session.how, session.last_step, what))
        return sorted(found, key=lambda one: one.time)


def _end(session: ReportedSession, own: Sequence[Event], logged: Logged, mine: Mask) -> None:
    """Sets how far a session got, and when and how it ended."""
    times = logged.times[mine]
    session.ended = float(times[np.isfinite(times)].max(initial=session.started))
    session.last_step = session.final_step = int(logged.table[mine, 0].max(initial=session.step))
    for one in own:
        if one["event"] == "rewind":
            session.rewound.append((one["time"], _step(one)))
            session.rewound_steps += max(0, int(numbers(one).get("undone", 0)))
    if session.rewound:
        counts = logged.table[: logged.num_kept][mine[: logged.num_kept], 0]
        session.final_step = int(counts.max(initial=session.rewound[-1][1]))
    ends = [one for one in own if one["event"] == "end"]
    if not ends:
        return
    end = ends[-1]
    session.final_step = max(session.final_step, _step(end))
    session.how = end["how"] if end.get("how") in ENDED else "stopped"
    session.what = str(end.get("what") or "")
    session.seconds = numbers(end.get("seconds"))
    session.last_step = max(session.last_step, _step(end))
    session.ended = max(session.ended, end["time"])
    said = [one for one in own if one["event"] == "message"]
    if session.how == "stopped" and not session.what and said:
        session.what = STOPPING.sub("", str(said[-1].get("what", "")))


def in_words(event: Event) -> str:
    """Describes a supervisor's event in a few words."""
    if event["event"] == "preflight":
        bad = event.get("bad")
        bad = bad if isinstance(bad, dict) else {}
        left_out = ", ".join(f"{node}: {why}" for node, why in bad.items())
        words = event.get("error") or (f"excluded {left_out}" if left_out else "all nodes are good")
        return f"nodes tested in {numbers(event).get('seconds', 0):.0f} s: {words}"
    if event["event"] == "recovered":
        return f"recovered, {numbers(event).get('lost_seconds', 0):.0f} s lost"
    what = ": ".join(str(event[name]) for name in ("kind", "node", "what") if event.get(name))
    action = str(event.get("action") or "")
    nodes = event.get("excluded")
    excluded = ", ".join(map(str, nodes)) if isinstance(nodes, list) else ""
    return what + (f" → {action}" if action else "") + (f" without {excluded}" if excluded else "")


def numbers(value: object) -> dict[str, float]:
    """Returns the entries of a table that are numbers."""
    items = value.items() if isinstance(value, dict) else ()
    return {
        str(name): float(one)
        for name, one in items
        if isinstance(one, int | float) and not isinstance(one, bool)
    }


def _session(number: int, line: Event) -> ReportedSession:
    begun = _time({"time": line.get("begun")}) or line["time"]
    return ReportedSession(number, min(begun, line["time"]), line["time"], _step(line), facts=line)


def _count_seconds(session: ReportedSession, logged: Logged, mine: Mask) -> None:
    """Sets how the session's time was used, and how much of it for steps that count."""
    start = {"start": session.started - session.begun}
    lines = np.flatnonzero(mine & np.isfinite(logged.table).all(axis=1))
    lines = lines[np.argsort(logged.table[lines, 1:].sum(axis=1), kind="stable")]
    steps, spent = logged.table[lines, 0], logged.table[lines, 1:]
    known = dict(zip(logged.uses, spent[-1].tolist(), strict=True)) if len(lines) else {}
    session.seconds = {**known, **session.seconds, **start}
    # A checkpoint may lie between two steps that were logged.
    begins = np.concatenate([[session.step], steps[:-1]])[: len(steps)]
    counted = (_undone_to(session, logged.times[lines]) - begins) / np.maximum(steps - begins, 1)
    counted = np.where(lines < logged.num_kept, 1.0, np.clip(counted, 0.0, 1.0))
    kept = (np.diff(spent, axis=0, prepend=0.0) * counted[:, None]).sum(axis=0)
    session.kept_seconds = {**dict(zip(logged.uses, kept.tolist(), strict=True)), **start}
    if session.kept_step >= session.final_step:  # time after the last logged line
        for use, seconds in session.seconds.items():
            if use not in start:
                more = seconds - known.get(use, 0.0)
                session.kept_seconds[use] = session.kept_seconds.get(use, 0.0) + more


def _undone_to(session: ReportedSession, times: Numbers) -> Numbers:
    """Returns the step, for each of these times, that the run later rewound or fell back to."""
    found = np.full(len(times), float(session.kept_step))
    for time, step in reversed(session.rewound):
        found[times <= time] = min(step, session.kept_step)
    return found


def _time(event: Event) -> float:
    value = event.get("time")
    return float(value) if isinstance(value, int | float) and 0 < value < LARGEST_TIME else 0.0


def _step(event: Event) -> int:
    value = event.get("step")
    return value if isinstance(value, int) else 0


@dataclass
class Goodput:
    """Seconds by use over all sessions, and the time between sessions."""

    parts: dict[str, float] = field(default_factory=dict)
    between: float = 0.0
    """Time with no session running: in the queue, or not started."""

    @property
    def in_sessions(self) -> float:
        return sum(self.parts.values())

    @property
    def share(self) -> float | None:
        """The share of session time spent on steps that became part of the model."""
        return self.parts["compute"] / self.in_sessions if self.in_sessions else None


def where_time_went(sessions: Sequence[ReportedSession]) -> Goodput:
    parts = dict.fromkeys(PARTS, 0.0)
    for session in sessions:
        used = {use: session.seconds.get(use, 0.0) for use in (*IN_LOOP, "start")}
        kept = {use: session.kept_seconds.get(use, 0.0) for use in used}
        for use, seconds in kept.items():
            parts[use] += seconds
        parts["lost"] += max(0.0, sum(used[use] - kept[use] for use in IN_LOOP))
        parts["end"] += max(0.0, session.ended - session.begun - sum(used.values()))
    gaps = itertools.pairwise(sessions)
    between = sum(max(0.0, later.begun - one.ended) for one, later in gaps)
    return Goodput(parts, between)
