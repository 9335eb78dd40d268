"""Tensors that are read when needed, and frozen weights that a checkpoint leaves out and that are
found again in the folder they were loaded from. Checkpoints of any format, as such tensors, are in
overland/apps/convert/formats.

A checkpoint may leave out frozen weights, because they stay where the run loaded them from: a run
that trains adapters on a frozen model of 140 GB saves only the adapters. Its index records what is
left out (`Origin`): the folder, the size and digest of each weight file, and the names of the
tensors. A reader of the checkpoint loads those from there, after comparing the digests.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overland.errors import CheckpointError, MismatchError
from overland.files import Moved, ignore

Shape = tuple[int, ...]

MODEL, OPTIMIZER, NUM_UPDATES = "model.", "optimizer.", "optimizer.num_updates"
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state, as torch and DeepSpeed name it

LEFT_OUT = "left_out"  # key in the run's facts in the index

_moved: ContextVar[Moved] = ContextVar("moved", default=ignore)


@contextmanager
def counting(moved: Moved) -> Iterator[None]:
    """Calls `moved` with the number of bytes whenever a file is read within this context."""
    before = _moved.set(moved)
    try:
        yield
    finally:
        _moved.reset(before)


def counter() -> Moved:
    """Returns the function that counts bytes read. A new thread does not inherit it, and must be
    given it."""
    return _moved.get()


@dataclass(frozen=True, eq=False)
class Lazy:
    """A tensor that is not in memory. By default reading a box costs as much as the whole."""

    shape: Shape
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def load(self) -> Tensor:
        raise NotImplementedError

    def load_box(self, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        return self.load()[slices_of(start, shape)]


def slices_of(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Returns the slices that select a box."""
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


@dataclass(frozen=True)
class Origin:
    """Tensors in a folder of safetensors, by their names in the model."""

    folder: Path
    files: Mapping[str, tuple[int, str]]
    """Size and digest of each file of weights."""
    names: frozenset[str]

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "files": {name: list(mark) for name, mark in self.files.items()},
            "names": sorted(self.names),
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Origin | None:
        """Returns what a checkpoint leaves out, according to its facts; None if it is complete."""
        found = facts.get(LEFT_OUT)
        if not found:
            return None
        try:
            files = {
                str(name): (int(size), str(mark)) for name, (size, mark) in found["files"].items()
            }
            return cls(Path(found["folder"]), files, frozenset(map(str, found["names"])))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the index entry for weights that are left out cannot be read: {error!r}"
            ) from None

    def find(self, also: Iterable[Path] = (), look_only: bool = False) -> Path:
        """Returns the folder that still holds exactly these weights: the original one, or one of
        `also`, where a run may be told to look if they have moved. `look_only` compares only sizes.
        """
        problems = []
        for folder in dict.fromkeys([self.folder, *also]):
            problem = self._difference(folder, look_only)
            if not problem:
                return folder
            problems.append(problem)
        raise MismatchError(
            f"this checkpoint leaves out {len(self.names):,} frozen tensors that were loaded from "
            f"{self.folder}, and they are no longer there: {problems[0]}. Restore them, or set "
            "checkpoint.initial_load_path to where they are now"
        )

    def check_given(self, given: Path) -> None:
        """Raises if a run that names another folder than the original one would train on other
        weights; the same weights may lie anywhere."""
        if given.resolve() == self.folder.resolve() or not given.exists():
            return
        if problem := self._difference(given, look_only=False):
            raise MismatchError(
                f"the frozen weights of this run are those of {self.folder}, and model.from or "
                f"checkpoint.initial_load_path names others ({problem}): set it back, or start a "
                "new run; to train these adapters on another model, `overland convert` them with "
                "`--to peft`, and name them in lora.adapter of a new run"
            )

    def _difference(self, folder: Path, look_only: bool) -> str:
        """Returns how the folder differs; an empty string if it has exactly these files."""
        for name, (size, _) in self.files.items():
            try:
                found = (folder / name).stat().st_size
            except OSError:
                return f"{folder / name} does not exist"
            if found != size:
                return f"{folder / name} has {found:,} bytes, not {size:,}"
        if look_only:
            return ""
        marks = mark_files(folder, self.files)
        changed = [name for name in self.files if marks[name] != self.files[name]]
        return f"{folder / changed[0]} has different contents" if changed else ""


def mark_files(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Returns size and digest of the files, reading several at a time at 1 GB/s each."""
    names = list(names)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "digest") as pool:
        return dict(zip(names, pool.map(lambda name: _mark(folder / name), names), strict=True))


def _mark(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        return file.tell(), digest.hexdigest()
