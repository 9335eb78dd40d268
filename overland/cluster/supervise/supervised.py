"""The supervised run: its settings from the job script, the steps it has done, and whether its disk
has room for the next checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from overland.cluster.supervise.events import tell
from overland.cluster.supervise.faults import Fault
from overland.cluster.supervise.policy import MAX_FAILED_STARTS
from overland.errors import Kind
from overland.run_folder import CHECKPOINT, CHECKPOINTS, DONE, LATEST, steps_in

LEAST = 64 * 2**20  # bytes of free space needed to start a run
TRIAL = 2**30  # most bytes written as a test: seconds on a disk that saves a checkpoint in minutes
CHUNK = 2**20


@dataclass(frozen=True)
class Supervised:
    """A run, as its job script describes it."""

    run: Path
    config: Path
    steps: int
    launch: Sequence[str]
    num_nodes: int
    tasks_per_node: int
    hang_seconds: float = 60.0
    max_failed_starts: int = MAX_FAILED_STARTS
    margin_seconds: float = 180.0
    checkpoint_folder: str = CHECKPOINTS
    preflight: bool = True
    requeue: bool = False

    @property
    def checkpoints(self) -> Path:
        return self.run / self.checkpoint_folder

    def is_done(self) -> bool:
        return self.steps_done() >= self.steps

    def steps_done(self) -> int:
        try:
            return steps_in((self.run / DONE).read_text())
        except OSError:
            return 0

    def newest_checkpoint(self) -> int:
        paths = self.checkpoints.glob("step_*")
        names = (CHECKPOINT.fullmatch(path.name) for path in paths)
        return max((int(name[1]) for name in names if name), default=0)

    def has_room(self) -> bool:
        """Whether the disk has room for logs and the next checkpoints."""
        needed = room_needed(self.checkpoints)
        return has_room(self.run, LEAST) and has_room(self.checkpoints, needed)

    def is_disk_of_node(self, fault: Fault) -> bool:
        """Whether the full disk is a node's own, such as its /tmp: the run's disk has room, and
        quotas only apply to shared disks."""
        if not fault.nodes or "quota" in fault.what.lower() or not self.has_room():
            return False
        tell(f"{self.run} has room: the full disk is a local one of {', '.join(fault.nodes)}")
        return True

    def lacks_room(self, fault: Fault) -> bool:
        """Whether the disk is full. Ranks keep running when logs cannot be written, so a full disk
        may show up as another fault, such as an srun that cannot write their output."""
        return fault.kind is Kind.DISK or not has_room(self.run, LEAST)


def room_needed(checkpoints: Path) -> int:
    """Returns the bytes needed: twice the size of the newest checkpoint."""
    sizes = [0]
    with contextlib.suppress(OSError):
        files = (checkpoints / LATEST).rglob("*")
        sizes = [file.stat().st_size for file in files if file.is_file()]
    return max(2 * sum(sizes), LEAST)


def has_room(folder: Path, num_bytes: int) -> bool:
    """Whether this many bytes can be written. A disk's free space says nothing about the user's
    quota of bytes or files, which only shows when something is written."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        if shutil.disk_usage(folder).free < num_bytes:
            return False
        return _can_write(folder / f".room-{os.getpid()}", min(num_bytes, TRIAL))
    except OSError:
        return False


def _can_write(path: Path, num_bytes: int) -> bool:
    chunk = os.urandom(CHUNK)  # zeros would take no room on a compressing file system
    try:
        with path.open("wb", buffering=0) as file:
            while file.tell() < num_bytes:
                if file.write(chunk) < len(chunk):
                    return False
            os.fsync(file.fileno())  # a file server may report the error only now
        return True
    finally:
        path.unlink(missing_ok=True)
