"""Writes and reads the supervisor's history of a run (attempts.jsonl, one event per line) and its
current status (live.json), and finds in them which nodes were bad.

Only the supervisor writes them (`Logbook`); `overland watch` and `overland report` read them, and
follow the other files of lines in a run folder in the same way (`Tail`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from overland.cluster.supervise.watchdog import Watchdog
from overland.files import append, replace_file
from overland.run_folder import ATTEMPTS, LIVE

Event = dict[str, Any]
CHUNK = 4 << 20  # bytes read at a time
LARGEST = 2**53  # integers below are exact in float64
LIVE_SECONDS = 10.0


class Tail:
    """Follows a growing file of lines: each call returns what was appended since the last one. A
    file that was replaced or truncated is read again from its beginning."""

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        """`last_bytes`: read only this much of the end of the file."""
        self.path, self.last_bytes = path, last_bytes
        self._forget()

    def _forget(self) -> None:
        self._inode, self._offset, self._rest = -1, 0, b""

    def chunks(self) -> Iterator[tuple[list[bytes], int, bool]]:
        """Yields (whole lines, bytes still to come, whether everything before is void). A last line
        without a newline is still being written, and is returned once it is complete."""
        try:
            if not self.path.is_file():  # opening a named pipe would block
                raise FileNotFoundError
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                is_other = stat.st_ino != self._inode or stat.st_size < self._offset
                if is_other:
                    self._forget()
                    self._inode = stat.st_ino
                    if self.last_bytes is not None and stat.st_size > self.last_bytes:
                        file.seek(stat.st_size - self.last_bytes - 1)
                        file.readline()  # the rest of a line
                        self._offset = file.tell()
                file.seek(self._offset)
                while data := file.read(CHUNK):
                    self._offset += len(data)
                    *lines, self._rest = (self._rest + data).split(b"\n")
                    yield lines, max(0, stat.st_size - self._offset), is_other
                    is_other = False
                if is_other:  # it is empty now
                    yield [], 0, True
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            if self._inode != -1:
                self._forget()
                yield [], 0, True


class Events:
    """All events of a run, read as they are appended. A line that is still being written is left
    for the next read."""

    def __init__(self, run: Path) -> None:
        self._tail = Tail(run / ATTEMPTS)
        self.all: list[Event] = []

    def read_on(self) -> None:
        for lines, _, is_other in self._tail.chunks():
            if is_other:
                self.all.clear()
            for line in lines:
                if (event := parse_event(line)) is not None:
                    self.all.append(event)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.all if event["event"] == kind]

    def last(self, *kinds: str) -> Event:
        return next((event for event in reversed(self.all) if event["event"] in kinds), {})

    def faults(self) -> list[Event]:
        """Returns the faults, each with the seconds lost once training had recovered."""
        found: list[Event] = []
        for event in self.all:
            if event["event"] == "fault":
                found.append({**event, "lost_seconds": None})
            elif event["event"] == "recovered" and found and found[-1]["lost_seconds"] is None:
                found[-1]["lost_seconds"] = event.get("lost_seconds")
        return found


def parse_event(line: bytes) -> Event | None:
    """Returns the event in a line, or None if there is none. Numbers that are not finite or too
    large to be exact become None too."""
    with suppress(ValueError, RecursionError):
        event = json.loads(line, parse_constant=_finite, parse_float=_finite, parse_int=_countable)
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            return event
    return None


def _finite(text: str) -> float | None:
    value = float(text)
    return value if abs(value) < LARGEST else None


def _countable(text: str) -> int | None:
    value = int(text)
    return value if abs(value) < LARGEST else None


def read_events(run: Path) -> list[Event]:
    events = Events(run)
    events.read_on()
    return events.all


def of_submission(events: list[Event], config: str) -> list[Event]:
    """Returns the events of the chain that trains this config file, of which each submission has
    its own copy. A resubmitted run may start from an earlier step, and its old faults no longer
    count, because someone has looked at them."""
    first = len(events)
    for number in reversed(range(len(events))):
        if events[number]["event"] == "session":
            if events[number].get("config") != config:
                break
            first = number
    return events[first:]


def bad_nodes(events: list[Event], since: float) -> dict[str, str]:
    """Returns nodes that were excluded after that time, or were suspected when a job gave up, with
    the reason; the latest come first."""
    found: dict[str, str] = {}
    for event in reversed(events):
        if float(event.get("time") or 0) < since:
            continue
        reasons: dict[str, str] = {}
        if event["event"] == "preflight":
            reasons = dict(event.get("bad") or {})
        elif event["event"] == "fault":
            reasons = dict.fromkeys(event.get("excluded") or [], str(event.get("what")))
        elif event["event"] == "end":
            reasons = dict.fromkeys(event.get("suspects") or [], str(event.get("what")))
        for node, reason in reasons.items():
            found.setdefault(node, reason)
    return found


def furthest_step(events: list[Event]) -> int:
    return max((int(event.get("step") or 0) for event in events), default=0)


class Logbook:
    """Writes events and status. A full disk must not end the supervisor: events that cannot be
    written are kept until the next write."""

    def __init__(self, run: Path, job: str) -> None:
        self.run, self.job = run, job
        run.mkdir(parents=True, exist_ok=True)
        self._unwritten: list[str] = []
        self._live_at = 0.0
        self._live_state: tuple[object, ...] = ()

    def write(self, event: str, **facts: Any) -> None:
        line = json.dumps({"time": time.time(), "job": self.job, "event": event, **facts})
        self._unwritten.append(line + "\n")
        try:
            while self._unwritten:
                append(self.run / ATTEMPTS, self._unwritten[0].encode())
                self._unwritten.pop(0)
        except OSError:
            self._unwritten.insert(0, "\n")  # part of a line may have been written

    def live(self, **facts: Any) -> None:
        """Writes live.json at once if the state has changed, otherwise every few seconds."""
        state = facts.get("state"), facts.get("attempt")
        if state == self._live_state and time.monotonic() - self._live_at < LIVE_SECONDS:
            return
        self._live_state, self._live_at = state, time.monotonic()
        line = json.dumps({"time": time.time(), "job": self.job, **facts})
        with suppress(OSError):
            replace_file(self.run / LIVE, f"{line}\n", durable=False)

    def show(
        self,
        dog: Watchdog,
        attempt: int,
        begun: int,
        step_seconds: float | None,
        is_restarting: bool,
    ) -> None:
        """Writes the status of the ranks for `overland watch`; `begun` is the step that the attempt
        started from."""
        self.live(
            state="training" if dog.step else "restarting" if is_restarting else "starting",
            attempt=attempt,
            step=max(dog.step, begun),
            phase=dog.phase.words,
            ranks=len(dog.ranks),
            nodes=len(dog.nodes),
            step_seconds=step_seconds,
            stepped=dog.stepped and round(time.time() - (time.monotonic() - dog.stepped), 1),
            transfer=dog.transfer(),
            slowest=dog.slowest(),
            late=[
                {"rank": r.rank, "node": r.node, "phase": r.phase.words, "seconds": round(r.age, 1)}
                for r in dog.late_ranks()
            ],
        )

    def note_silent_nodes(self, silent: list[str], before: list[str], step: int) -> list[str]:
        """Records nodes that are silent while training advances: their ranks are not monitored."""
        for node in silent:
            if node not in before:
                tell(f"{node} is silent although training continues: its agent is gone")
                self.write("agent", node=node, step=step, what="silent")
        for node in before:
            if node not in silent:
                tell(f"{node} reports again")
                self.write("agent", node=node, step=step, what="heard again")
        return silent

    def note_slow_ranks(self, dog: Watchdog, attempt: int) -> None:
        for rank in dog.stalled_ranks():
            what = f"has moved no bytes of a checkpoint for {rank.quiet:.0f} s"
            tell(f"rank {rank.rank} on {rank.node} {what}")
            self.write("stall", rank=rank.rank, node=rank.node, step=rank.step, what=what)
        for rank, factor, what in dog.stragglers():
            tell(f"rank {rank.rank} on {rank.node} is slow: it {what}")
            self.write(
                "straggler",
                attempt=attempt,
                rank=rank.rank,
                node=rank.node,
                factor=round(factor, 2),
                what=what,
            )


def tell(words: str) -> None:
    """Prints a line to the job's log, unless its disk is full."""
    with suppress(OSError):
        print(f"{time.strftime('%F %T')} {words}", flush=True)
