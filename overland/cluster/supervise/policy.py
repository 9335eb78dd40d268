"""Decides what follows a failed attempt, from those since the last new step: restart after a pause,
give the nodes back, or end the chain; which nodes are used then: `roster.py`.

- The same error at the same place twice ends the chain, because it would happen again. If a single
  node may be the cause, the job first gives its nodes back, and the next job shows.
- Everything else may be temporary: the network, a node's memory, a file system. It is retried, on
  other nodes if there are spares, after a pause that doubles each time.
- A job that cannot reach a new step gives its nodes back, and the next job of the chain continues
  on others. Each such job halves the retries of the next, so that a permanent fault stays cheap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from overland.errors import Kind

MAX_FAILED_STARTS = 8
"""On 640 nodes of Frontier, five to six of ten starts failed: with eight tries 1 job in 100 gives
up; with two it was 1 in 3 (docs/evidence/restarts.md)."""
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 15.0, 600.0
MAY_PASS = (Kind.NETWORK, Kind.HANG, Kind.UNKNOWN, Kind.DISK)


@dataclass(frozen=True)
class Failure:
    """An attempt that failed."""

    kind: Kind
    place: str = ""
    """Where in the program; empty if that means nothing, as for a broken connection."""
    nodes: tuple[str, ...] = ()
    """The nodes to blame, as far as is known."""
    new_steps: int = 0
    replaced: bool = False
    """Whether the node to blame was excluded, so that the next attempt runs on other nodes."""
    session: int = 0
    step: int = 0

    @property
    def made_no_progress(self) -> bool:
        return not self.new_steps and not self.replaced


@dataclass(frozen=True)
class Answer:
    """What to do after a failure."""

    action: Literal["restart", "stop", "give back", "next session", "requeue"]
    reason: str = ""
    pause_seconds: float = 0.0


def decide(streak: Sequence[Failure], max_failed_starts: int = MAX_FAILED_STARTS) -> Answer:
    """Returns what to do about the last of these failures; all are since the last new step."""
    last = streak[-1]
    if last.kind is Kind.TAKEN:
        return Answer("next session")
    same = [past for past in streak[:-1] if _is_same(past, last)]
    if any(_rules_out_the_node(past, last) for past in same):
        return Answer("stop", "the same error at the same place twice")
    if same and not last.replaced:
        return Answer(
            "give back", f"the same error twice on {', '.join(last.nodes)}, without a spare"
        )
    tries = _tries(streak, max_failed_starts)
    failed = sum(past.made_no_progress for past in streak if past.session == last.session)
    if failed >= tries:
        attempts = "1 attempt" if failed == 1 else f"{failed} attempts"
        return Answer("give back", f"{attempts} without a new step; giving the nodes back")
    return Answer("restart", pause_seconds=_pause(last, failed))


def with_failure(streak: Sequence[Failure], failure: Failure) -> list[Failure]:
    """Returns the failures since the last new step, including this one, which may itself have
    completed new steps."""
    is_over = failure.new_steps > 0 or any(failure.step > past.step for past in streak)
    return [*([] if is_over else streak), failure]


def read_streak(events: Iterable[dict[str, Any]]) -> tuple[list[Failure], int]:
    """Returns a chain's failures since the last new step, and its number of sessions."""
    streak: list[Failure] = []
    sessions = 0
    for event in events:
        sessions += event["event"] == "session"
        step = int(event.get("step") or 0)
        if event["event"] == "fault":
            failure = Failure(
                Kind(event["kind"]) if event.get("kind") in set(Kind) else Kind.UNKNOWN,
                str(event.get("place") or ""),
                tuple(event.get("nodes") or ()),
                int(event.get("new_steps") or 0),
                bool(event.get("excluded")),
                sessions,
                step,
            )
            streak = with_failure(streak, failure)
        elif any(step > past.step for past in streak) or event.get("how") == "failed":
            streak = []
    return streak, sessions


def suspects(streak: Sequence[Failure]) -> list[str]:
    """Returns nodes to blame for attempts of this session that made no new step."""
    ours = [past for past in streak if past.session == streak[-1].session]
    return list(
        dict.fromkeys(node for past in ours if past.made_no_progress for node in past.nodes)
    )


def _is_same(past: Failure, last: Failure) -> bool:
    return bool(last.place) and (past.kind, past.place) == (last.kind, last.place)


def _rules_out_the_node(past: Failure, last: Failure) -> bool:
    """Whether the program itself failed twice: on different nodes, or on several at once."""
    return last.kind.is_of_the_program or not last.nodes or past.nodes != last.nodes


def _tries(streak: Sequence[Failure], max_failed_starts: int) -> int:
    """Returns the number of tries of this session: half as many as the previous session had, if it
    used them up."""
    failed = Counter(past.session for past in streak if past.made_no_progress)
    tries = max_failed_starts
    for session in sorted(failed):
        if session != streak[-1].session and failed[session] >= tries:
            tries = max(1, tries // 2)
    return tries


def _pause(last: Failure, failed: int) -> float:
    if not last.made_no_progress or last.kind not in MAY_PASS:
        return 0.0
    return min(PAUSE_SECONDS * 2 ** min(failed - 1, 10), LONGEST_PAUSE_SECONDS)
