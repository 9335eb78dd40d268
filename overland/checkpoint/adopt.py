"""Resuming from the training stub's four files alone, ours or the stub's own: they become a
checkpoint of the run first, and are not touched themselves."""

from __future__ import annotations

from pathlib import Path

from overland.checkpoint.folder import set_aside
from overland.checkpoint.formats.checkpoint import LazyCheckpoint, Options
from overland.checkpoint.formats.overland import write_overland
from overland.checkpoint.formats.torch import PROGRESS, WEIGHTS, open_torch
from overland.errors import CheckpointError
from overland.files import Disk
from overland.run_folder import COMMITTED, checkpoint_name


def is_four_files(path: Path) -> bool:
    return (path / WEIGHTS).is_file() and not (path / COMMITTED).is_file()


def open_four_files(path: Path) -> LazyCheckpoint:
    """What they hold, if they say at which step."""
    source = open_torch(path)
    step = source.extras.get("step", 0)
    if not isinstance(step, int) or step < 0:
        raise CheckpointError(
            f"{path / PROGRESS} gives {step!r:.40} as its step, expected a number from 0 on"
        )
    return source


def adopt(path: Path, checkpoints: Path, disk: Disk) -> Path:
    """Writes what the files hold as a checkpoint, and returns where it is."""
    source = open_four_files(path)
    target = checkpoints / checkpoint_name(source.extras.get("step", 0))
    beside = checkpoints / f".{target.name}.tmp"
    disk.make_folder(checkpoints)
    disk.remove_folder(beside)
    write_overland(source, beside, Options())
    if target.exists():
        set_aside(target, disk)
    disk.rename(beside, target)
    return target
