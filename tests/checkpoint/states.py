"""Small states to save, and disks that fail."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overland.checkpoint.read import fill, open_checkpoint
from overland.checkpoint.store import Outcome, Store
from overland.config.schema import Checkpoint as Settings
from overland.files import Disk


def some_state(seed: int) -> dict[str, Tensor]:
    """Tensors of several types and shapes, a scalar and an empty one among them."""
    numbers = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers)

    return {
        "model.matrix": random(96, 40),
        "model.bf16": random(7, 5).bfloat16(),
        "model.bytes": torch.randint(0, 255, (1001,), dtype=torch.uint8, generator=numbers),
        "optimizer.num_updates": torch.tensor(float(seed)),
        "model.long": random(50_001),
    }


def like(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, 17) for name, tensor in state.items()}


def load(path: Path, state: dict[str, Tensor]) -> dict[str, Any]:
    """Fills the tensors of `state`, however they are sharded; returns everything that is not a
    tensor."""
    with open_checkpoint(path) as checkpoint:
        fill(checkpoint, state)
        return checkpoint.run


def save(folder: Path, step: int, disk: Disk | None = None, **settings: Any) -> Outcome:
    """Saves `some_state(step)`."""
    store = Store(folder, Settings.model_validate(settings), disk=disk)
    try:
        store.save(step, some_state(step), {"progress": {"step": step}})
        (outcome,) = store.finish()
    finally:
        store.close()
    return outcome


class Killed(BaseException):
    """The process is gone: nothing after this point happened."""


class MortalDisk(Disk):
    """Dies before its n-th operation. What was not synced by then may be lost: `lose` undoes it.

    Modelled after what file systems promise: a file's bytes are safe once the file is synced, a
    name once its folder is; a rename that was not made safe may be undone.
    """

    def __init__(self, dies_at: int | None) -> None:
        self.dies_at, self.count = dies_at, 0
        self.operations: list[str] = []
        self.unsynced_files: set[Path] = set()
        self.unsynced_names: dict[Path, set[Path]] = {}
        self.renames: list[tuple[Path, Path, str]] = []  # and what the name pointed to before

    def at(self, operation: str, path: Path) -> None:
        self.operations.append(f"{operation} {path.name}")
        self.count += 1
        if self.dies_at is not None and self.count >= self.dies_at:
            raise Killed(self.operations[-1])

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self.unsynced_files.add(path)
        self.unsynced_names.setdefault(path.parent, set()).add(path)
        return descriptor

    def close_durably(self, descriptor: int, path: Path) -> None:
        super().close_durably(descriptor, path)
        self.unsynced_files.discard(path)

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self.unsynced_names.pop(path, None)
        self.renames = [one for one in self.renames if one[1].parent != path]

    def rename(self, source: Path, target: Path) -> None:
        self.at("rename", source)
        replaced = os.readlink(target) if target.is_symlink() else ""
        source.rename(target)
        self.renames.append((source, target, replaced))
        moved = {p for p in self.unsynced_files if source in p.parents}
        self.unsynced_files -= moved
        self.unsynced_files |= {target / p.relative_to(source) for p in moved}
        if source in self.unsynced_names:
            names = self.unsynced_names.pop(source)
            self.unsynced_names[target] = {target / p.name for p in names}
        self.sync_folder(target.parent)

    def lose(self, chance: random.Random) -> None:
        """Power was cut: everything that was not synced is there, damaged or missing, at random."""
        for path in self.unsynced_files:
            if path.is_file() and chance.random() < 0.7:
                size = path.stat().st_size
                with path.open("r+b") as file:
                    if chance.random() < 0.5:
                        file.truncate(chance.randint(0, size))
                    elif size:
                        file.seek(chance.randint(0, size - 1))
                        file.write(bytes(min(4096, size)))
        for names in self.unsynced_names.values():
            for path in names:
                if chance.random() < 0.5:
                    path.unlink(missing_ok=True)
        for source, target, replaced in reversed(self.renames):
            if chance.random() < 0.5:
                target.rename(source)
                if replaced:
                    target.symlink_to(replaced)


class FullDisk(Disk):
    """Has room for so many bytes and no more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write_at(self, descriptor: int, data: memoryview, offset: int, path: Path) -> None:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super().write_at(descriptor, data, offset, path)


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, symlinks=True)
    return target
