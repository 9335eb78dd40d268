"""Reads attempts.jsonl, the history of a run that its supervisor writes, one event per line."""

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
