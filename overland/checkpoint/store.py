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
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from overland.checkpoint.errors import CheckpointError

PROGRESS = "progress.json"


class Store:
    """Saves and finds the checkpoints of one folder. All ranks call it together."""

    def __init__(self, folder: Path, keep_latest_k: int) -> None:
        self.folder, self.keep_latest_k = folder, keep_latest_k

    def save(
        self, step: int, model: nn.Module, optimizer: Optimizer, extra: Mapping[str, Any],
        progress: Mapping[str, Any],
    ) -> Path:  # fmt: skip
        path, beside = self.folder / f"step_{step}", self.folder / f".step_{step}.tmp"
        if dist.get_rank() == 0:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
        dist.barrier()
        dcp.save(_state(model, optimizer, extra), checkpoint_id=beside)
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


def load(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint into the model and optimizer, however sharded; returns the progress."""
    state = _state(model, optimizer, extra or {})
    try:
        dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
        progress = json.loads((path / PROGRESS).read_text())
    except (OSError, ValueError, CheckpointException) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from None
    model.load_state_dict(state["model"], assign=False)
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return progress


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [(int(m[1]), path) for path in folder.glob("step_*") if (m := _step(path))]
    return [path for _, path in sorted(found) if (path / PROGRESS).exists()]


def latest_checkpoint(folder: Path) -> Path | None:
    found = checkpoints(folder)
    return found[-1] if found else None


def _step(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"step_(\d+)", path.name)


def _state(
    model: nn.Module, optimizer: Optimizer | None, extra: Mapping[str, Any]
) -> dict[str, Any]:
    state: dict[str, Any] = {"model": model.state_dict(), **extra}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state
