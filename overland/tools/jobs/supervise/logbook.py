"""What a supervisor writes into the run folder, and nobody else does: `overland watch` reads it.

`attempts.jsonl` has a line for everything that happened, `live.json` how things stand.
"""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from overland.files import replace_file
from overland.run_folder import ATTEMPTS, LIVE, STOPPED

Event = dict[str, Any]

LIVE_SECONDS = 10.0


class Logbook:
    """A full disk must not end the supervisor: what cannot be written is kept for the next time."""

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
            with (self.run / ATTEMPTS).open("ab", buffering=0) as file:
                while self._unwritten:
                    data = self._unwritten[0].encode()
                    if file.write(data) < len(data):
                        raise OSError(errno.ENOSPC, "half of a line was written")
                    self._unwritten.pop(0)
        except OSError:
            self._unwritten.insert(0, "\n")  # half of a line may be there

    def live(self, **facts: Any) -> None:
        """At once where the state has changed, else now and then."""
        state = facts.get("state"), facts.get("attempt")
        if state == self._live_state and time.monotonic() - self._live_at < LIVE_SECONDS:
            return
        self._live_state, self._live_at = state, time.monotonic()
        line = json.dumps({"time": time.time(), "job": self.job, **facts})
        with suppress(OSError):
            replace_file(self.run / LIVE, f"{line}\n", durable=False)

    def stop_chain(self, reason: str) -> None:
        """The links that still wait end at once, until the run is submitted anew."""
        try:
            handle = os.open(self.run / STOPPED, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(handle, "w") as file:
                file.write(f"{reason}\n")
        except OSError:
            pass

    def events(self) -> list[Event]:
        return read_events(self.run)


def read_events(run: Path) -> list[Event]:
    """A line that is being written is left for the next time."""
    events = []
    try:
        lines = (run / ATTEMPTS).read_text().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            events.append(event)
    return events


def of_submission(events: list[Event], config: str) -> list[Event]:
    """Those of the chain that trains this config, a copy of its own for every submission. A run
    that was submitted anew may go back to an earlier step, and has someone's attention."""
    first = len(events)
    for number in reversed(range(len(events))):
        if events[number]["event"] == "session":
            if events[number].get("config") != config:
                break
            first = number
    return events[first:]


def bad_nodes(events: list[Event], since: float) -> dict[str, str]:
    """Nodes that were left out after that time, or were suspected when a job gave up; with the
    reason, the last one first."""
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
