"""The folder of a run's checkpoints: decides which are kept (the latest, every n steps, the best),
which is newest, deleted or set aside, and whether the disk has room.

checkpoint/
  step_100/            committed
  step_137.preempt/    committed; saved because the session was ending
  latest -> step_137.preempt
  step_200.set-aside/  later than the step that was resumed by hand
  step_220.nonfinite/  with values that are not finite: kept for inspection, never resumed
  .step_250.tmp/       being written, or left behind by a killed session
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overland.checkpoint.format import INDEX
from overland.checkpoint.read import read_marker
from overland.config.schema import Checkpoint
from overland.errors import FULL, CheckpointError
from overland.files import Disk, reserve
from overland.run_folder import CHECKPOINT, COMMITTED, LATEST
from overland.words import size


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed checkpoint and the contents of its marker."""

    path: Path
    step: int
    about: dict[str, Any]

    @property
    def validation_loss(self) -> float:
        loss = self.about.get("validation_loss")
        return math.inf if loss is None else float(loss)

    @property
    def validated_on(self) -> str:
        """A mark of the sequences that the validation loss was measured on."""
        return str(self.about.get("validated_on"))


def broken(path: Path) -> Path:
    """Returns the name of a checkpoint whose state is not finite."""
    return path.with_name(f"{path.name}.nonfinite")


def list_checkpoints(folder: Path) -> list[CommittedCheckpoint]:
    """Returns the committed checkpoints, oldest first."""
    found = []
    for path in committed(folder):
        with suppress(CheckpointError):
            found.append(CommittedCheckpoint(path, step_of(path), read_marker(path)))
    return found


def committed(folder: Path) -> list[Path]:
    """Returns everything that was committed, oldest first, even if it has been damaged since."""
    return [path for path in _named(folder) if (path / COMMITTED).is_file()]


def uncommitted(folder: Path) -> list[Path]:
    """Returns folders that are named like checkpoints but were never committed."""
    return [path for path in _named(folder) if not (path / COMMITTED).is_file()]


def _named(folder: Path) -> list[Path]:
    named = (path for path in folder.glob("step_*") if CHECKPOINT.fullmatch(path.name))
    return sorted(named, key=lambda path: (step_of(path), path.name))


def latest_checkpoint(folder: Path) -> Path | None:
    found = list_checkpoints(folder)
    return found[-1].path if found else None


def newest_in(path: Path) -> Path:
    """Returns `path` if it is a checkpoint, otherwise the newest one in the run or folder there."""
    if (path / COMMITTED).is_file():
        return path
    found = [one for folder in (path, *path.glob("*/")) for one in committed(folder)]
    return max(found, key=step_of) if found else path


def step_of(path: Path) -> int:
    named = CHECKPOINT.fullmatch(path.name)
    assert named is not None, path
    return int(named[1])


def superfluous(
    found: Sequence[CommittedCheckpoint], settings: Checkpoint, newest: str
) -> list[CommittedCheckpoint]:
    """Returns the checkpoints that the settings do not keep; `found` is ordered, oldest first. The
    one just written always stays, since a run may have gone back to an earlier step."""
    if not settings.keep_latest_k:
        return []
    kept = [one for one in found if one.path.name == newest]
    kept += found[-settings.keep_latest_k :]
    if settings.keep_every:
        kept += [one for one in found if one.step % settings.keep_every == 0]
    judged = sorted(found, key=lambda one: one.validation_loss)
    for mark in {one.validated_on for one in found}:  # losses on different sets do not compare
        those = [one for one in judged if one.validated_on == mark]
        kept += [one for one in those if one.validation_loss < math.inf][: settings.keep_best]
    return [one for one in found if one not in kept]


def lack_of_room(folder: Path, settings: Checkpoint, num_bytes: int) -> str:
    """Returns a warning if the disk has too little space for the checkpoints of this size that are
    kept at a time, or even for one; otherwise an empty string. A new one is written before an old
    one is deleted, and one of whole tensors is written twice. A quota is detected once the folder
    exists, by reserving space for one checkpoint, if the file system can do that without
    writing."""
    place = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(place).free
    room_of_one = num_bytes * (2 if settings.type == "full" else 1)
    there = len(list_checkpoints(folder))
    more = max(0, settings.keep_latest_k - there) * num_bytes + room_of_one
    lacks = ""
    if free < room_of_one:
        lacks = f"has {size(free)} free, but a checkpoint needs {size(room_of_one)}"
    elif free < more:
        return (
            f"{folder} has {size(free)} free, but checkpoints of {size(num_bytes)} each will need "
            f"{size(more)}: free some space, or lower checkpoint.keep_latest_k = "
            f"{settings.keep_latest_k}"
        )
    elif folder.exists() and not _can_reserve(folder, room_of_one):
        lacks = f"has no room for a checkpoint of {size(room_of_one)}, although its disk has "
        lacks += f"{size(free)} free (is there a quota?)"
    fallback = "the last one can go to checkpoint.fallback_folder"
    return lacks and f"{folder} {lacks}: saves will fail unless you free some space; {fallback}"


def _can_reserve(folder: Path, num_bytes: int) -> bool:
    try:
        reserve(folder / f".room-{os.getpid()}", num_bytes)
    except OSError as error:
        return error.errno not in FULL
    return True


def delete(path: Path, disk: Disk) -> None:
    """Deletes a checkpoint, or what was made from one. A marker goes first, so that nothing
    mistakes the rest for a checkpoint."""
    disk.remove(path / COMMITTED)
    doomed = path.with_name(f".{path.name}.deleted")
    disk.remove_folder(doomed)
    disk.rename(path, doomed)
    disk.remove_folder(doomed)


def tidy(folder: Path, disk: Disk) -> None:
    """Removes what a killed session left partly written or partly deleted."""
    for pattern in (".step_*.tmp", ".step_*.deleted", ".step_*.shards"):
        for path in folder.glob(pattern):
            disk.remove_folder(path)
    for path in uncommitted(folder):
        if (path / INDEX).is_file():  # partly deleted: a folder gets this name only when complete
            disk.remove_folder(path)


def set_aside(path: Path, disk: Disk) -> Path:
    """Renames a checkpoint so that it is no longer found. Nothing is lost."""
    number, target = 1, path.with_name(f"{path.name}.set-aside")
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.set-aside-{number}")
    disk.rename(path, target)
    return target


def set_later_aside(folder: Path, after_step: int, disk: Disk) -> list[Path]:
    """Sets later checkpoints aside, so that none of them is mistaken for the newest one of the run
    that continues from here."""
    later = [set_aside(path, disk) for path in _named(folder) if step_of(path) > after_step]
    newest = latest_checkpoint(folder)
    if later and newest is not None:
        disk.point(folder / LATEST, newest.name)
    elif later:
        disk.remove(folder / LATEST)
    return later
