"""Reads the ledger that a run has written: what the model consumed in each step."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from overland.errors import DataError
from overland.training.ledger import HEAD, MAGIC, Digests


@dataclass(frozen=True)
class Fed:
    """One step: the batch that it consumed, and a digest of each row."""

    step: int
    batch: int
    digests: Digests


@dataclass(frozen=True)
class Mark:
    """The start of a session: the next batch, and whether batches before it were skipped."""

    batch: int
    leaves_out: bool


@dataclass(frozen=True)
class FedSteps:
    """The steps of a run, and what the model consumed in each; the run began after step
    `start`."""

    start: int
    fed: dict[int, Fed]
    marks: dict[int, Mark]

    @property
    def last(self) -> int:
        return max(self.fed, default=self.start)


def read_ledger(path: Path) -> FedSteps:
    if not path.is_file():
        raise DataError(f"{path} does not exist: the run has not recorded any steps")
    fed: dict[int, Fed] = {}
    marks: dict[int, Mark] = {}
    start: int | None = None
    for place, step, batch, shape, body in _records(path):
        rows = np.frombuffer(body, "<i8").reshape(shape)
        if start is None and place > 0:  # what came before it is damaged
            start = 0
        if not len(rows):
            start = step if start is None else min(start, step)
            fed = {known: one for known, one in fed.items() if known <= step}
            marks = {known: one for known, one in marks.items() if known <= step}
            marks[step] = Mark(batch, bool(rows.shape[1]))
        for i, row in enumerate(rows):
            fed[step + i] = Fed(step + i, batch + i, row)
    return FedSteps(start or 0, dict(sorted(fed.items())), marks)


def batches_of(path: Path) -> Iterator[tuple[int, int, int]]:
    """Yields the step, the batch and the number of steps of each record; marks have 0 steps. Only
    headers are read, so that even terabytes of tokens take a moment; nothing is verified."""
    for _, step, batch, (count, _), _ in _records(path, verifies=False):
        yield step, batch, count


def _records(
    path: Path, verifies: bool = True
) -> Iterator[tuple[int, int, int, tuple[int, int], bytes]]:
    """Yields the offset, step, batch, shape and digests of each record that is intact; without
    digests, of each one that fits, if nothing `verifies` it."""
    if not path.stat().st_size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(MAGIC)
        while 0 <= at <= len(data) - HEAD.size:
            _, check, step, batch, count, width = HEAD.unpack_from(data, at)
            body = at + HEAD.size
            end = body + 8 * count * width
            fits = 0 <= count < 1 << 40 and 0 <= width < 1 << 40 and end <= len(data)
            if fits and (not verifies or zlib.crc32(data[at + 8 : end]) == check):
                yield at, step, batch, (count, width), data[body:end] if verifies else b""
                at = data.find(MAGIC, end)
            else:
                at = data.find(MAGIC, at + 1)
