"""What was really fed to the model: 8 bytes per row and step, in one file of the run folder.

A digest is taken of the very tensors that the model is given, on the device they lie on. Ranks
gather theirs every few steps, and rank 0 appends them. Where a session starts, a mark says from
which step on: what an earlier session fed after that step did not become part of the model.

    mark    step from which everything after is void
    record  steps that follow each other, the batch of each, a digest per row
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from overland.data.errors import DataError

HEAD = struct.Struct("<4sIqqqq")  # magic, checksum of what follows, step, batch, steps, rows
MAGIC = b"OVLL"


@dataclass(frozen=True)
class Fed:
    """One step: the batch that it was given, and a digest of each of its rows."""

    step: int
    batch: int
    digests: npt.NDArray[np.int64]


class Ledger:
    """Appends to the file; one process does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = whole_bytes(path)
        if path.exists() and path.stat().st_size > whole:  # torn by a kill
            with path.open("r+b") as file:
                file.truncate(whole)

    def mark(self, step: int) -> None:
        """The model is that of `step`: what was fed after it is void."""
        self._append(step, 0, np.zeros((0, 0), np.int64))

    def add(self, step: int, batch: int, rows: npt.NDArray[np.int64]) -> None:
        """Steps `step`, `step + 1`, … were given batches `batch`, `batch + 1`, …."""
        self._append(step, batch, rows)

    def _append(self, step: int, batch: int, rows: npt.NDArray[np.int64]) -> None:
        body = rows.astype("<i8").tobytes()
        place = struct.pack("<qqqq", step, batch, *rows.shape)
        head = HEAD.pack(MAGIC, zlib.crc32(place + body), step, batch, *rows.shape)
        with self.path.open("ab") as file:
            file.write(head + body)


@dataclass(frozen=True)
class History:
    """What the model was given, by step; the run began after step `start`."""

    start: int
    fed: dict[int, Fed]

    @property
    def last(self) -> int:
        return max(self.fed, default=self.start)


def read_ledger(path: Path) -> History:
    if not path.is_file():
        raise DataError(f"{path} does not exist: the run has recorded nothing")
    fed: dict[int, Fed] = {}
    start: int | None = None
    for step, batch, rows in _records(path):
        if not len(rows):
            start = step if start is None else min(start, step)
            for later in [known for known in fed if known > step]:
                del fed[later]
        for i, row in enumerate(rows):
            fed[step + i] = Fed(step + i, batch + i, row)
    return History(start or 0, dict(sorted(fed.items())))


def whole_bytes(path: Path) -> int:
    """Up to where the file consists of whole records."""
    if not path.exists():
        return 0
    return sum(HEAD.size + rows.nbytes for _, _, rows in _records(path))


def _records(path: Path) -> Iterator[tuple[int, int, npt.NDArray[np.int64]]]:
    with path.open("rb") as file:
        while len(head := file.read(HEAD.size)) == HEAD.size:
            magic, check, step, batch, count, width = HEAD.unpack(head)
            body = file.read(8 * count * width) if magic == MAGIC else b""
            if magic != MAGIC or zlib.crc32(head[8:] + body) != check:
                return
            yield step, batch, np.frombuffer(body, "<i8").reshape(count, width)
