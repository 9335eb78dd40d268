"""What was really fed to the model: 8 bytes per row and step, in one file of the run folder.

A digest is taken of the very tensors that the model is given, on the device they lie on. Ranks
gather theirs every few steps, and rank 0 appends them. Where a session starts, a mark says from
which step on: what an earlier session fed after that step did not become part of the model.

    mark    a step, after which everything so far is void; the batch that comes next; and whether
            batches before that one were left out on purpose
    record  steps that follow each other, the batch of each, a digest per row

Records are found by their checksums, so that one that was torn by a kill costs itself alone.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from overland.data.errors import DataError

HEAD = struct.Struct("<4sIqqqq")  # magic, checksum of what follows, step, batch, steps, rows
PLACE = struct.Struct("<qqqq")
MAGIC = b"OVLL"

Digests = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Fed:
    """One step: the batch that it was given, and a digest of each of its rows."""

    step: int
    batch: int
    digests: Digests


@dataclass(frozen=True)
class Mark:
    """Where a session began: the batch that came next, and whether others were left out."""

    batch: int
    leaves_out: bool


@dataclass(frozen=True)
class History:
    """What the model was given, by step; the run began after step `start`."""

    start: int
    fed: dict[int, Fed]
    marks: dict[int, Mark]

    @property
    def last(self) -> int:
        return max(self.fed, default=self.start)


class Ledger:
    """Appends to the file; one process does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def is_new(self) -> bool:
        return not self.path.exists()

    def mark(self, step: int, batch: int, leaves_out: bool = False) -> None:
        """The model is that of `step`: what was fed after it is void; `batch` comes next."""
        self._append(step, batch, np.zeros((0, int(leaves_out)), np.int64))

    def add(self, step: int, batch: int, rows: Digests) -> None:
        """Steps `step`, `step + 1`, … were given batches `batch`, `batch + 1`, …."""
        self._append(step, batch, rows)

    def sync(self) -> None:
        """What was written survives a power cut."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())

    def _append(self, step: int, batch: int, rows: Digests) -> None:
        body = rows.astype("<i8").tobytes()
        check = zlib.crc32(PLACE.pack(step, batch, *rows.shape) + body)
        with self.path.open("ab") as file:
            file.write(HEAD.pack(MAGIC, check, step, batch, *rows.shape) + body)


def read_ledger(path: Path) -> History:
    if not path.is_file():
        raise DataError(f"{path} does not exist: the run has recorded nothing")
    fed: dict[int, Fed] = {}
    marks: dict[int, Mark] = {}
    start: int | None = None
    for place, step, batch, rows in _records(path):
        if start is None and place > 0:  # what stood before it is damaged
            start = 0
        if not len(rows):
            start = step if start is None else min(start, step)
            fed = {known: one for known, one in fed.items() if known <= step}
            marks = {known: one for known, one in marks.items() if known <= step}
            marks[step] = Mark(batch, bool(rows.shape[1]))
        for i, row in enumerate(rows):
            fed[step + i] = Fed(step + i, batch + i, row)
    return History(start or 0, dict(sorted(fed.items())), marks)


def _records(path: Path) -> Iterator[tuple[int, int, int, Digests]]:
    """Those that are whole, and where they are; after one that is not, the next that is."""
    if not path.stat().st_size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(MAGIC)
        while 0 <= at <= len(data) - HEAD.size:
            _, check, step, batch, count, width = HEAD.unpack_from(data, at)
            body = at + HEAD.size
            end = body + 8 * count * width
            fits = 0 <= count < 1 << 40 and 0 <= width < 1 << 40 and end <= len(data)
            if fits and zlib.crc32(data[at + 8 : end]) == check:
                rows = np.frombuffer(data[body:end], "<i8").reshape(count, width)
                yield at, step, batch, rows
                at = data.find(MAGIC, end)
            else:
                at = data.find(MAGIC, at + 1)
