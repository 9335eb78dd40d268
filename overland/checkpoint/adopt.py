"""Resumes from the training stub's four files alone, written by us or by the stub: they are first
copied into a checkpoint of the run, and are not changed themselves."""

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
    """Opens the four files; raises if their step is not a valid number."""
    source = open_torch(path)
    step = source.extras.get("step", 0)
    if not isinstance(step, int) or step < 0:
        raise CheckpointError(
            f"{path / PROGRESS} has step {step!r:.40}, expected an integer of at least 0"
        )
    return source


def adopt(path: Path, checkpoints: Path, disk: Disk) -> Path:
    """Writes the contents of the files as a checkpoint, and returns its path."""
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
