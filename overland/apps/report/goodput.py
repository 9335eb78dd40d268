"""Where the time of a run went, and how much of it was productive."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from overland.apps.report.sessions import ReportedSession

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
        whole = max(0.0, session.ended - session.begun)
        kept, used = session.kept_seconds, session.seconds
        for use in ("compute", "data", "validation", "save", "start"):
            parts[use] += kept.get(use, 0.0)
        in_loop = ("compute", "data", "validation", "save")
        lost = sum(used.get(use, 0.0) - kept.get(use, 0.0) for use in in_loop)
        parts["lost"] += max(0.0, lost)
        known = sum(used.get(use, 0.0) for use in ("start", *in_loop))
        parts["end"] += max(0.0, whole - known)
    gaps = itertools.pairwise(sessions)
    between = sum(max(0.0, later.begun - one.ended) for one, later in gaps)
    return Goodput(parts, between)
