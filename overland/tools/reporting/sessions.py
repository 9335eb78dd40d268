"""The sessions of a run and what happened in them: from sessions.jsonl, and under a supervisor from
attempts.jsonl too.

Runs of earlier versions have no sessions.jsonl: theirs are told by attempts, or by the times of
what was logged.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from overland.run_folder import SESSIONS
from overland.tools.jobs.supervise.events import Event, Events
from overland.tools.reporting.lines import Lines, Numbers
from overland.training.history import PAUSE, Tail

ENDED = ("finished", "stopped", "failed", "killed", "running")
STOPPING = re.compile(r"^stopping after step \d+: ")
LARGEST_TIME = 1e11
LEAST_PAUSE = 30.0  # seconds: shorter gaps between lines are no restarts


@dataclass
class Session:
    """Ranks that were started once."""

    number: int
    begun: float
    started: float
    """When it was ready for its first step."""
    step: int
    """The step that it went on from."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What it ran on."""
    last_step: int = 0
    """The furthest that it got."""
    ended: float = 0.0
    how: str = "killed"
    """One of ENDED; "killed" where nothing tells of an end."""
    what: str = ""
    kept_step: int = 0
    """The last of its steps that became part of the model."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What its time was used for, as far as is known."""
    kept_seconds: dict[str, float] = field(default_factory=dict)
    """The same, until `kept_step`."""

    @property
    def lost_steps(self) -> int:
        return max(0, self.last_step - self.kept_step)


@dataclass(frozen=True)
class Happening:
    """Something that happened to a run, for its time line."""

    time: float
    kind: str
    step: int | None
    what: str


@dataclass(frozen=True)
class Logged:
    """When each line was logged, that counts or was lost, with its step and its seconds by use."""

    uses: list[str]
    times: Numbers
    table: Numbers

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
        return cls(uses, times, np.concatenate(tables))


def with_borders(sessions: Sequence[Session]) -> Iterator[tuple[Session, float]]:
    """Yields each session, and when the next one began."""
    for number, session in enumerate(sessions, 1):
        yield session, sessions[number].begun if number < len(sessions) else np.inf


class Story:
    """Sessions and happenings, read on as they are appended."""

    def __init__(self, run: Path) -> None:
        self._tail, self._events = Tail(run / SESSIONS), Events(run)
        self._lines: list[Event] = []
        self.version = 0

    def read_on(self) -> None:
        known = len(self._events.all)
        self._events.read_on()
        self.version += len(self._events.all) != known
        for lines, _, is_other in self._tail.chunks():
            if is_other:
                self._lines.clear()
            self._lines += parse_events(lines)
            self.version += 1

    def sessions(self, lines: Lines, is_alive: bool) -> list[Session]:
        """All sessions, in their order; the last one still runs if the run `is_alive`."""
        begun = [one for one in self._lines if one["event"] == "start"]
        found = [_session(number, one) for number, one in enumerate(begun, 1)]
        if not found:
            found = guessed_sessions(lines, self._events.of("attempt"))
        logged = Logged.of(lines)
        for session, border in with_borders(found):
            self._end(session, border, logged)
        for session, later in itertools.pairwise(found):
            session.kept_step = min(session.last_step, later.step)
        for session in found:
            _count_seconds(session, logged)
        if found and is_alive and found[-1].how == "killed":
            found[-1].how = "running"
        return found

    def _end(self, session: Session, border: float, logged: Logged) -> None:
        ends = [
            one
            for one in self._lines
            if one["event"] == "end" and session.begun <= one["time"] < border
        ]
        times = [session.started]
        mine = (logged.times >= session.begun) & (logged.times < border)
        if mine.any():
            times.append(float(logged.times[mine].max()))
            session.last_step = int(logged.table[mine, 0].max())
        session.last_step = max(session.last_step, session.step)
        if ends:
            session.how = str(ends[-1].get("how"))
            session.how = session.how if session.how in ENDED else "stopped"
            session.what = str(ends[-1].get("what") or "")
            session.seconds = numbers(ends[-1].get("seconds"))
            session.last_step = max(session.last_step, _step(ends[-1]))
            times.append(ends[-1]["time"])
            said = [
                one
                for one in self._lines
                if one["event"] == "message" and session.begun <= one["time"] <= ends[-1]["time"]
            ]
            if session.how == "stopped" and not session.what and said:
                session.what = STOPPING.sub("", str(said[-1].get("what", "")))
        for fault in self._events.all:
            time = _time(fault)
            if fault["event"] in ("fault", "signal") and session.begun <= time < border:
                words = (str(fault.get(name) or "") for name in ("kind", "what"))
                session.what = session.what or ": ".join(word for word in words if word)
                times.append(time)
        session.ended = max(times)
        session.kept_step = session.last_step

    def happenings(self, sessions: Sequence[Session]) -> list[Happening]:
        """What a time line shows beside the sessions, in order."""
        found = []
        for one in self._lines:
            what, step = str(one.get("what") or ""), _step(one)
            if one["event"] == "save":
                step = one["saved"] if isinstance(one.get("saved"), int) else step
                seconds = numbers(one)
                what = f"step {step:,} saved in {seconds.get('seconds', 0):.1f} s, of which "
                what += f"training waited {seconds.get('waited', 0):.1f} s"
            elif one["event"] == "rewind":
                what = f"back to step {step:,} after a spike of the loss"
            elif one["event"] != "message":
                continue
            found.append(Happening(one["time"], one["event"], step, what))
        for event in self._events.all:
            if event["event"] in ("fault", "preflight", "straggler", "stall", "recovered", "agent"):
                found.append(Happening(_time(event), event["event"], _step(event), in_words(event)))
        for session in sessions:
            if session.how in ("killed", "failed"):
                what = session.what or "it ended without a word"
                found.append(Happening(session.ended, session.how, session.last_step, what))
        return sorted(found, key=lambda one: one.time)

    @property
    def is_recorded(self) -> bool:
        """Whether the run's own version wrote its sessions down."""
        return any(one["event"] == "start" for one in self._lines)


def parse_events(lines: Sequence[bytes]) -> list[Event]:
    found = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            one = json.loads(line)
            if isinstance(one, dict) and isinstance(one.get("event"), str) and _time(one):
                found.append(one)
    return found


def in_words(event: Event) -> str:
    """An event of a supervisor, in a few words."""
    if event["event"] == "preflight":
        bad = event.get("bad") or {}
        left_out = ", ".join(f"{node}: {why}" for node, why in bad.items()) if bad else ""
        words = event.get("error") or (f"left out {left_out}" if left_out else "all nodes are good")
        return f"nodes tested in {numbers(event).get('seconds', 0):.0f} s: {words}"
    if event["event"] == "recovered":
        return f"recovered, {numbers(event).get('lost_seconds', 0):.0f} s lost"
    what = ": ".join(str(event[name]) for name in ("kind", "node", "what") if event.get(name))
    action = str(event.get("action") or "")
    excluded = ", ".join(map(str, event.get("excluded") or []))
    return what + (f" → {action}" if action else "") + (f" without {excluded}" if excluded else "")


def numbers(value: object) -> dict[str, float]:
    """Those of a table that are numbers."""
    items = value.items() if isinstance(value, dict) else ()
    return {
        str(name): float(one)
        for name, one in items
        if isinstance(one, int | float) and not isinstance(one, bool)
    }


def _session(number: int, line: Event) -> Session:
    begun = line.get("begun")
    begun = float(begun) if isinstance(begun, int | float) else line["time"]
    return Session(number, min(begun, line["time"]), line["time"], _step(line), facts=line)


def guessed_sessions(lines: Lines, attempts: Sequence[Event]) -> list[Session]:
    """Sessions by a supervisor's attempts, or else by gaps in what was logged."""
    if attempts:
        return [
            Session(number, _time(one), _time(one), int(numbers(one).get("from_step", 0)), one)
            for number, one in enumerate(attempts, 1)
        ]
    times, steps = lines.logged["time"], lines.logged.steps
    known = np.isfinite(times)
    times, steps = times[known], steps[known]
    if not len(times):
        return []
    gaps = np.diff(times)
    usual = float(np.median(gaps)) if len(gaps) else 0.0
    starts = np.flatnonzero(gaps > max(PAUSE * usual, LEAST_PAUSE)) + 1
    found = [Session(1, float(times[0]), float(times[0]), max(0, int(steps[0]) - 1))]
    for number, place in enumerate(starts.tolist(), 2):
        begun = float(times[place]) - usual
        found.append(Session(number, begun, begun, int(steps[place - 1])))
    return found


def _count_seconds(session: Session, logged: Logged) -> None:
    """Sets what the session's time was used for, and until its last step that counts."""
    start = {"start": session.started - session.begun}
    mine = (logged.times >= session.begun) & (logged.times <= session.ended)
    table = logged.table[mine]
    table = table[np.isfinite(table).all(axis=1)]
    table = table[np.argsort(table[:, 0], kind="stable")]
    spent = table[:, 1:].max(axis=0).tolist() if len(table) else []
    known = dict(zip(logged.uses, spent, strict=True)) if len(table) else {}
    session.seconds = {**known, **session.seconds, **start}
    if session.kept_step >= session.last_step:
        session.kept_seconds = dict(session.seconds)
        return
    session.kept_seconds = {**dict.fromkeys(logged.uses, 0.0), **start}
    if len(table) and session.kept_step > session.step:
        # A checkpoint may lie between two steps that were logged.
        steps = np.concatenate([[session.step], table[:, 0]])
        for number, use in enumerate(logged.uses, 1):
            values = np.concatenate([[0.0], table[:, number]])
            session.kept_seconds[use] = float(np.interp(session.kept_step, steps, values))


def _time(event: Event) -> float:
    value = event.get("time")
    return float(value) if isinstance(value, int | float) and 0 < value < LARGEST_TIME else 0.0


def _step(event: Event) -> int:
    value = event.get("step")
    return value if isinstance(value, int) else 0
