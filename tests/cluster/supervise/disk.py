"""A disk so small that it can be filled. Only root may mount one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

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


def fill(disk: Path, run: SubmittedRun) -> None:
    """Until the ranks end for want of room; then there is some again."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(2**20))
        except OSError:
            pass
    run.wait_until(lambda: not run.ranks(), "the ranks have ended")
    time.sleep(3)  # it has looked for room by then, and found none
    assert not run.ranks()
    ballast.unlink()
