"""Files in the run folder that only the supervisor writes, and `overland watch` reads.

`attempts.jsonl` has one line per event (events.py reads it); `live.json` has the current status.
"""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from overland.cluster.supervise.watchdog import Watchdog
from overland.errors import Kind
from overland.files import replace_file
from overland.run_folder import ATTEMPTS, LIVE, STOPPED

LIVE_SECONDS = 10.0


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
            with (self.run / ATTEMPTS).open("ab", buffering=0) as file:
                while self._unwritten:
                    data = self._unwritten[0].encode()
                    if file.write(data) < len(data):
                        raise OSError(errno.ENOSPC, "half of a line was written")
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
        slowest = dog.slowest()
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
            slowest=slowest
            and {
                "rank": slowest.rank,
                "node": slowest.node,
                "factor": round(dog.slowness(slowest), 2),
            },
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

    def note_recovery(
        self, attempt: int, kind: Kind, num_faults: int, lost_seconds: float, step: int
    ) -> None:
        more = f", the last of {num_faults} faults," if num_faults > 1 else ""
        tell(f"recovered from {kind}{more} at step {step}: {lost_seconds:.0f} s lost")
        self.write(
            "recovered",
            attempt=attempt,
            kind=kind,
            faults=num_faults,
            lost_seconds=round(lost_seconds, 1),
            step=step,
        )

    def stop_chain(self, reason: str) -> None:
        """Makes the queued jobs of the chain end at once, until the run is resubmitted."""
        try:
            handle = os.open(self.run / STOPPED, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(handle, "w") as file:
                file.write(f"{reason}\n")
        except OSError:
            pass


def tell(words: str) -> None:
    """Prints a line to the job's log, unless its disk is full."""
    with suppress(OSError):
        print(f"{time.strftime('%F %T')} {words}", flush=True)
