"""What the compiler made, in one file of the run folder: the next session starts warm.

The compiler's own cache is a folder in the node's /tmp, which clusters empty after each job. One
file that is written whole asks nothing of a parallel filesystem: no locks, no thousand small files.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from overland.training.callbacks import Callback

if TYPE_CHECKING:
    from overland.training.run import Run

FILE = "compiled.bin"


class CompileCache(Callback):
    """Every rank reads the file before the first step; after it, rank 0 writes it anew."""

    def __init__(self, run: Run) -> None:
        self.path = run.folder.root / FILE
        self.is_saved = not run.world.is_first

    def on_start(self, run: Run) -> None:
        # Entries are found by a hash of code, shapes, device and version: stale ones do no harm.
        if not self.path.is_file():
            return
        try:
            torch.compiler.load_cache_artifacts(self.path.read_bytes())
        except Exception as error:  # another torch's file, or half of one; all is compiled anew
            run.call("on_message", f"{self.path} cannot be used: {error!r}")

    def on_step(self, run: Run) -> None:
        if self.is_saved:
            return
        self.is_saved = True
        made = torch.compiler.save_cache_artifacts()
        if made is None:
            return
        part = self.path.with_suffix(".part")
        part.write_bytes(made[0])
        os.replace(part, self.path)
