"""Stopping and saving in step: a request seen by one rank (a signal, a STOP file, a time limit) is
carried out by all after the same step.

A run stops early, saves and can be resumed when
- any rank receives a signal: Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2, SIGHUP;
- a file STOP appears in the run folder;
- the session has lasted `checkpoint.stop_after_minutes`, or the Slurm job is about to end.
Rank 0 watches for the last two, and for saves by the clock. It also notices a save whose state is
not finite, after which the run stops without saving again.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout, default_pg_timeout

from overland.config.schema import Checkpoint as Settings
from overland.run_folder import STOP
from overland.words import duration
from overland.world.signals import (
    ENDED_AT_ONCE,
    INTERRUPTED,
    LAUNCHED,
    SAME_PRESS_SECONDS,
    SIGNALS,
    WARNINGS,
    leave,
    leave_terminal,
    restore_handlers,
)

LOOK_EVERY_SECONDS = 2.0  # for the file: shared file systems are slow


class Wish(IntEnum):
    """What to do after this step; of several wishes, the greatest wins."""

    NOTHING = 0
    SAVE = 1
    STOP_FILE = 2
    SESSION_OVER = 3
    WALLTIME = 4
    SIGNAL = 5
    GIVE_UP = 6

    @property
    def stops(self) -> bool:
        return self > Wish.SAVE

    @property
    def reason(self) -> str:
        return {
            Wish.STOP_FILE: f"found a file {STOP} in the run folder",
            Wish.SESSION_OVER: "checkpoint.stop_after_minutes has passed",
            Wish.WALLTIME: "the job's time limit is near (checkpoint.walltime_margin_minutes)",
            Wish.SIGNAL: "received a signal",
            Wish.GIVE_UP: "the state is not finite",
        }.get(self, "")


class Clock:
    """Knows, on rank 0, when the next save is due and when the session must end."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.stop_file = folder / STOP
        self._interval = _seconds(settings.interval_minutes)
        self._session = _seconds(settings.stop_after_minutes)
        self._margin = settings.walltime_margin_minutes * 60
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        self._job_end = float(end) if end.isdecimal() else float("inf")
        self._started = self._saved = time.monotonic()
        self._looked = -LOOK_EVERY_SECONDS  # so that an existing file is seen at once
        self._slowest_save = 0.0
        self.gives_up = False
        """Set once the state is known not to be finite, from which training never recovers."""

    def wish(self) -> Wish:
        if self.gives_up:
            return Wish.GIVE_UP
        now = time.monotonic()
        # There must be time for one more save, whatever the margin is.
        if time.time() + max(self._margin, 2 * self._slowest_save) >= self._job_end:
            return Wish.WALLTIME
        if now - self._started >= self._session:
            return Wish.SESSION_OVER
        if now - self._looked >= LOOK_EVERY_SECONDS:
            self._looked = now
            if self.stop_file.exists():
                return Wish.STOP_FILE
        return Wish.SAVE if now - self._saved >= self._interval else Wish.NOTHING

    def seconds_left(self) -> float:
        """Returns how long the job still lasts, less the time for one more save."""
        return max(0.0, self._job_end - time.time() - 2 * self._slowest_save)

    def saving(self) -> None:
        self._saved = time.monotonic()

    def saved(self, seconds: float) -> None:
        self._slowest_save = max(self._slowest_save, seconds)


class StopRequest:
    """Lets the ranks agree on a stop: in each step they `ask` before the computation and read the
    answer with `agreed` after it, so that it travels while the devices are busy. A second Ctrl-C
    ends the process."""

    def __init__(self, clock: Clock | None, timeout_seconds: int) -> None:
        self.clock = clock
        self.signal: signal.Signals | None = None
        self._since = 0.0
        self.num_ends = 0
        """How often this rank was told to end; warnings of a job's end do not count."""
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._limit: timedelta | None = timedelta(seconds=timeout_seconds)
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._answer: dist.Work | None = None

    def __enter__(self) -> StopRequest:
        self._previous = {}
        if threading.current_thread() is threading.main_thread():  # only this one can set handlers
            self._previous = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        restore_handlers(self._previous)

    def ask(self) -> None:
        wish = self.clock.wish() if self.clock is not None else Wish.NOTHING
        self._flag.fill_(max(wish, Wish.SIGNAL) if self.signal is not None else wish)
        if self._group is not None:
            self._answer = dist.all_reduce(
                self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True
            )

    def agreed(self) -> Wish:
        if self._answer is not None:
            self._answer.wait()
            self._answer = None
            if self._limit is not None:  # the first step may take longer
                # A rank that fails cannot exit before its last answer has come or timed out.
                _set_pg_timeout(self._limit, self._group)
                self._limit = None
        return Wish(int(self._flag.item()))

    def any_rank(self, value: bool) -> bool:
        """Returns whether any rank says yes."""
        flag = torch.tensor([int(value)], dtype=torch.int32)
        if self._group is not None:
            _set_pg_timeout(default_pg_timeout, self._group)  # saves may end far apart
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())

    def reason(self, wish: Wish) -> str:
        if self.signal is None:
            return wish.reason
        words = f"{wish.reason} ({self.signal.name})"
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        if self.signal is signal.SIGUSR1 and end.isdecimal() and int(end) > time.time():
            # `overland submit` lets Slurm send it this long before the end.
            words += f", {duration(int(end) - time.time())} before the job's time limit"
            words += " (checkpoint.walltime_margin_minutes)"
        return words

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        leave_terminal(number)
        if self.signal is not None and now - self._since <= SAME_PRESS_SECONDS:
            return
        self.num_ends += number not in WARNINGS
        if self.signal is None:
            self.signal = signal.Signals(number)
        elif number == signal.SIGINT and LAUNCHED not in os.environ:
            leave(INTERRUPTED, ENDED_AT_ONCE)
        self._since = now


def _seconds(minutes: float | None) -> float:
    return float("inf") if minutes is None else minutes * 60
