"""The story of a run as its supervisor wrote it: attempts.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from overland.training.tail import Tail

Event = dict[str, Any]


class Events:
    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self.all: list[Event] = []

    def read_on(self) -> None:
        for lines, _, is_other in self._tail.chunks():
            if is_other:
                self.all.clear()
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict) and "event" in event:
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
