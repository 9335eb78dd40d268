"""Checkpoints of a run: a folder `step_N` each, sharded by PyTorch's DCP, with progress.json.

Written as `.step_N.tmp` and renamed when every rank is done: a folder named `step_N` is complete.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from overland.checkpoint.errors import CheckpointError

PROGRESS = "progress.json"


class Store:
    """Saves and finds the checkpoints of one folder. All ranks call it together."""

    def __init__(self, folder: Path, keep_latest_k: int) -> None:
        self.folder, self.keep_latest_k = folder, keep_latest_k

    def save(self, step: int, state: Mapping[str, Tensor], progress: Mapping[str, Any]) -> Path:
        path, beside = self.folder / f"step_{step}", self.folder / f".step_{step}.tmp"
        if dist.get_rank() == 0:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
        dist.barrier()
        dcp.save(dict(state), checkpoint_id=beside)
        if dist.get_rank() == 0:
            (beside / PROGRESS).write_text(json.dumps(dict(progress)))
            shutil.rmtree(path, ignore_errors=True)
            beside.rename(path)
            self._forget_old()
        dist.barrier()
        return path

    def latest(self) -> Path | None:
        return latest_checkpoint(self.folder)

    def _forget_old(self) -> None:
        if self.keep_latest_k:
            for path in checkpoints(self.folder)[: -self.keep_latest_k]:
                shutil.rmtree(path)


def load(path: Path, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Reads a checkpoint into the tensors of `state`, however sharded; returns the progress."""
    for part in (PROGRESS, ".metadata"):
        if not (path / part).is_file():
            raise CheckpointError(f"{path} cannot be read as a checkpoint: it has no {part}")
    try:
        dcp.load(dict(state), checkpoint_id=path, no_dist=not dist.is_initialized())
        progress: dict[str, Any] = json.loads((path / PROGRESS).read_text())
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {_line(first)}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {_line(error)}") from None
    return progress


def set_aside(folder: Path, after_step: int) -> list[Path]:
    """Renames checkpoints of later steps, so that none of them is taken for the newest one."""
    later = [path for path in checkpoints(folder) if step_of(path) > after_step]
    return [path.rename(path.with_name(f"{path.name}.set-aside")) for path in later]


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted((path for path in found if (path / PROGRESS).exists()), key=step_of)


def latest_checkpoint(folder: Path) -> Path | None:
    found = checkpoints(folder)
    return found[-1] if found else None


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
