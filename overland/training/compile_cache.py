"""Keeps compiled code in the run folder, so that the next session starts warm.

torch.compile caches its output on the node, usually in /tmp, which clusters empty after each job.
In the run folder there is one file per pipeline stage, written whole by the stage's first rank and
read by one rank for all: no locks, and no thousands of small files that every rank requests from a
parallel file system. Entries are found by a hash of code, shapes, device and version, so that
several nodes, devices and versions can share a file, and stale entries do no harm. Our own kernels
are not kept: Triton compiles them again in 3 s.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from overland.checkpoint.plan import broadcast
from overland.files import replace_file
from overland.training.callbacks import Callback

if TYPE_CHECKING:
    from overland.training.run import Run


class CompileCache(Callback):
    """Keeps the output of torch.compile."""

    def __init__(self, run: Run) -> None:
        pp = run.mesh.degrees.pp
        self.stage = run.world.rank * pp // run.world.size  # each compiles its own code
        self.path = file_of_stage(run.folder.root, self.stage)
        self.is_saved = run.world.rank % (run.world.size // pp) != 0

    def on_start(self, run: Run) -> None:
        made = read_for_all(run)[self.stage]
        if not made:
            return
        try:
            torch.compiler.load_cache_artifacts(made)
        except (
            Exception
        ) as error:  # from another torch version, or incomplete; everything is compiled again
            run.call("on_message", f"{self.path} cannot be used: {error!r}")

    def on_step(self, run: Run) -> None:
        """Writes the file once, or reports why it could not: a full disk costs the next session
        some time, but must not end this one."""
        if self.is_saved:
            return
        self.is_saved = True
        made = torch.compiler.save_cache_artifacts()
        if made is None:
            return
        try:
            replace_file(self.path, made[0], durable=False)
        except OSError as error:
            run.call("on_message", f"{self.path} was not written: {error.strerror}")


def file_of_stage(folder: Path, stage: int) -> Path:
    return folder / (f"compiled_{stage}.bin" if stage else "compiled.bin")


def read_for_all(run: Run) -> list[bytes]:
    """Returns the files of all stages, read by rank 0; empty bytes for one that is missing. Files
    owned by another user are ignored."""
    read = []
    for stage in range(run.mesh.degrees.pp):
        path = file_of_stage(run.folder.root, stage)
        try:
            is_ours = run.world.is_first and path.stat().st_uid == os.getuid()
            read.append(path.read_bytes() if is_ours else b"")
        except OSError:
            read.append(b"")
    return broadcast(read, run.store.group)
