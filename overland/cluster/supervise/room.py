"""Room on the disk of a run: one that starts on a full disk fails at its next save."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

LEAST = 64 * 2**20


def room_needed(checkpoints: Path) -> int:
    """Bytes: twice what the newest checkpoint takes."""
    sizes = [0]
    with contextlib.suppress(OSError):
        files = (checkpoints / "latest").rglob("*")
        sizes = [file.stat().st_size for file in files if file.is_file()]
    return max(2 * sum(sizes), LEAST)


def has_room(folder: Path, num_bytes: int) -> bool:
    return shutil.disk_usage(folder).free >= num_bytes
