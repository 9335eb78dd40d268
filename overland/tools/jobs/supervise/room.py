"""Room on the disk of a run: one that starts on a full disk fails at its next save."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from overland.run_folder import LATEST

LEAST = 64 * 2**20
TRIAL = 2**30  # written at most: it takes seconds on a disk that saves a checkpoint in minutes
CHUNK = 2**20


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
