"""A disk so small that it can be filled. Only root may mount one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from overland.checkpoint.folder import latest_checkpoint, step_of
from tests.cluster.supervised import SubmittedRun


@contextlib.contextmanager
def small_disk(folder: Path, options: str = "size=1500m") -> Iterator[Path]:
    """Mounted there, or else a plain folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """Not a byte of room is left, for as long as this lasts."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**20))
    try:
        yield
    finally:
        ballast.unlink()


def fill_for_a_while(disk: Path, run: SubmittedRun) -> None:
    """A save falls into this time. The ranks train on, and save again once there is room; or they
    end, where srun cannot write what they print, and are started again."""
    last = run.live_step() + 12
    with full(disk):
        run.wait_until(lambda: run.live_step() >= last or not run.ranks(), "a save has failed")
    run.wait_until(lambda: has_checkpoint(run, last), "a checkpoint is saved again")


def kill_while_full(disk: Path, run: SubmittedRun, rank: int) -> None:
    """Nothing is started before there is room."""
    with full(disk):
        run.signal_rank(rank, signal.SIGKILL)
        run.wait_until(lambda: not run.ranks(), "the ranks have ended")
        time.sleep(5)
        assert not run.ranks()


def has_checkpoint(run: SubmittedRun, since_step: int) -> bool:
    path = latest_checkpoint(run.root / "checkpoint")
    return path is not None and step_of(path) >= since_step
