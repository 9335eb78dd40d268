"""Asks Slurm about the jobs of a run, in the background because squeue may be slow."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from overland.slurm import squeue

ASK_EVERY_SECONDS = 20.0  # controllers of large clusters are busy
ANSWER_SECONDS = 15.0


@dataclass(frozen=True)
class QueuedJob:
    id: str
    state: str
    left: str
    """Remaining walltime, in Slurm's format."""
    reason: str
    """Why it is waiting."""
    start: str
    """When it started, or is expected to."""

    @property
    def runs(self) -> bool:
        return self.state not in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")


class Queue:
    def __init__(self) -> None:
        self.jobs: list[QueuedJob] | None = None
        """None until Slurm has answered, and if there is no Slurm."""
        self._thread: threading.Thread | None = None
        self._asked = -ASK_EVERY_SECONDS

    def ask(self, which: str, patience: float = 0.0) -> None:
        """Asks for the jobs selected by this squeue option, unless it was asked recently; waits for
        the answer for at most `patience` seconds."""
        is_busy = self._thread is not None and self._thread.is_alive()
        if not is_busy and time.monotonic() - self._asked >= ASK_EVERY_SECONDS:
            self._asked = time.monotonic()
            self._thread = threading.Thread(target=self._ask, args=(which,), daemon=True)
            self._thread.start()
        if self._thread is not None:
            self._thread.join(patience)

    def _ask(self, which: str) -> None:
        self.jobs = queued(which)


def queued(which: str) -> list[QueuedJob] | None:
    lines = squeue(which, form="%i|%T|%L|%r|%S", timeout=ANSWER_SECONDS)
    if lines is None:
        return None
    rows = [line.split("|") for line in lines]
    jobs = [QueuedJob(*row) for row in rows if len(row) == 5]
    return sorted(jobs, key=lambda job: (not job.runs, len(job.id), job.id))
