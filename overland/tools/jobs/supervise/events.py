"""The story of a run as its supervisor wrote it, line by line: attempts.jsonl."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from overland.run_folder import ATTEMPTS
from overland.training.history import Tail

Event = dict[str, Any]
LARGEST = 2**53  # integers below are exact in float64


class Events:
    """All events of a run, read on as they are appended. A line that is being written is left for
    the next time."""

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
        """Each with what was lost, once training went on after it."""
        found: list[Event] = []
        for event in self.all:
            if event["event"] == "fault":
                found.append({**event, "lost_seconds": None})
            elif event["event"] == "recovered" and found and found[-1]["lost_seconds"] is None:
                found[-1]["lost_seconds"] = event.get("lost_seconds")
        return found


def parse_event(line: bytes) -> Event | None:
    """None for what is no event. Numbers that nothing could be counted with are None, too."""
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
    """Returns the events of the chain that trains this config; each submission has its own copy.
    A run that was submitted again may go back to an earlier step, and has someone's attention."""
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
