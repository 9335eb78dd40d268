"""Free space, and a file that is written, synced, read back and compared."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from overland.world.wire import Message

MIB = 2**20


def folders(run_folder: str) -> dict[str, Path]:
    """Where a run writes: its folder, or the nearest above it that is there; and the node's own
    folder for temporary files, where kernels are cached."""
    run = Path(run_folder).expanduser().absolute()
    while not run.is_dir():
        run = run.parent
    return {"run folder": run, "temporary folder": Path(tempfile.gettempdir())}


def measure(folder: Path, num_bytes: int) -> Message:
    """A disk that refuses is an answer too."""
    try:
        space = os.statvfs(folder)
        facts: Message = {"path": str(folder), "free_gib": space.f_bavail * space.f_frsize / 2**30}
        return {**facts, **_write_and_read(folder, num_bytes)}
    except OSError as error:
        return {"path": str(folder), "error": error.strerror or str(error)}


def _write_and_read(folder: Path, num_bytes: int) -> Message:
    """The file loses its name at once, so that none is left behind, whatever happens."""
    descriptor, name = tempfile.mkstemp(prefix=".overland-preflight-", dir=folder)
    try:
        os.unlink(name)
        content = os.urandom(num_bytes)
        start = time.perf_counter()
        written = 0
        while written < num_bytes:
            written += os.write(descriptor, content[written : written + 4 * MIB])
        os.fsync(descriptor)
        middle = time.perf_counter()
        if hasattr(os, "posix_fadvise"):  # else the answer would come from memory
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        parts = [os.pread(descriptor, 4 * MIB, at) for at in range(0, num_bytes, 4 * MIB)]
        end = time.perf_counter()
    finally:
        os.close(descriptor)
    return {
        "right": b"".join(parts) == content,
        "write_gb_per_s": num_bytes / (middle - start) / 1e9,
        "read_gb_per_s": num_bytes / (end - middle) / 1e9,
    }
