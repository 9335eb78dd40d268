"""The run that is supervised: what its job script says of it, and what its folder shows."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from overland.errors import Kind
from overland.run_folder import CHECKPOINT, CHECKPOINTS, DONE, LATEST
from overland.tools.jobs.supervise.faults import Fault
from overland.tools.jobs.supervise.logbook import tell
from overland.tools.jobs.supervise.policy import MAX_FAILED_STARTS

LEAST = 64 * 2**20  # bytes that a disk must take for a run to start on it
TRIAL = 2**30  # written at most: it takes seconds on a disk that saves a checkpoint in minutes
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
        try:
            return int((self.run / DONE).read_text()) >= self.steps
        except (OSError, ValueError):
            return False

    def newest_checkpoint(self) -> int:
        paths = self.checkpoints.glob("step_*")
        names = (CHECKPOINT.fullmatch(path.name) for path in paths)
        return max((int(name[1]) for name in names if name), default=0)

    def has_room(self) -> bool:
        """Whether there is room on its disk for logs and for the next checkpoints."""
        needed = room_needed(self.checkpoints)
        return has_room(self.run, LEAST) and has_room(self.checkpoints, needed)

    def is_disk_of_node(self, fault: Fault) -> bool:
        """Whether the disk that is full is a node's own, such as its /tmp: that of the run has
        room, and quotas are for shared disks."""
        if not fault.nodes or "quota" in fault.what.lower() or not self.has_room():
            return False
        tell(f"{self.run} has room: it is a disk of {', '.join(fault.nodes)} that is full")
        return True

    def lacks_room(self, fault: Fault) -> bool:
        """Ranks go on where logs cannot be written, so that a full disk may end them in other
        words: by an srun that cannot write what they print."""
        return fault.kind is Kind.DISK or not has_room(self.run, LEAST)


def room_needed(checkpoints: Path) -> int:
    """Bytes: twice what the newest checkpoint takes."""
    sizes = [0]
    with contextlib.suppress(OSError):
        files = (checkpoints / LATEST).rglob("*")
        sizes = [file.stat().st_size for file in files if file.is_file()]
    return max(2 * sum(sizes), LEAST)


def has_room(folder: Path, num_bytes: int) -> bool:
    """Whether as much can be written there. What a disk has free says nothing of a user's quota, of
    bytes or of files: that shows only when something is written."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        if shutil.disk_usage(folder).free < num_bytes:
            return False
        return _can_write(folder / f".room-{os.getpid()}", min(num_bytes, TRIAL))
    except OSError:
        return False


def _can_write(path: Path, num_bytes: int) -> bool:
    chunk = os.urandom(CHUNK)  # zeros take no room where files are compressed
    try:
        with path.open("wb", buffering=0) as file:
            while file.tell() < num_bytes:
                if file.write(chunk) < len(chunk):
                    return False
            os.fsync(file.fileno())  # a server may tell only now
        return True
    finally:
        path.unlink(missing_ok=True)
