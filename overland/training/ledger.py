"""The ledger: a record of the data that the model consumed, 8 bytes per row and step, in one file
of the run folder.

A digest is computed from the very tensors that the model gets, on their own device. Ranks gather
their digests every few steps, and rank 0 appends them. When a session starts, it writes a mark with
its step: what an earlier session consumed after that step did not become part of the model.

    mark    a step, after which everything so far is void; the next batch; and whether batches
            before that one were skipped on purpose
    record  consecutive steps, the batch of each, a digest per row

Records are found by their checksums, so a record torn by a kill affects no other. If the disk is
full, records are kept in memory and written later; a checkpoint waits for them. A run only writes
it; `apps/ledger.py` reads it.
"""

from __future__ import annotations

import struct
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from overland.files import append, new_file, sync

HEAD = struct.Struct("<4sIqqqq")  # magic, checksum of what follows, step, batch, steps, rows
PLACE = struct.Struct("<qqqq")
MAGIC = b"OVLL"
KEPT_BYTES = 1 << 24  # of records not yet synced to disk: at most a few minutes' worth
Digests = npt.NDArray[np.int64]


class Ledger:
    """Appends to the file, from one process only. What the disk rejects is kept until it fits."""

    def __init__(self, path: Path, elsewhere: Path | None = None) -> None:
        """`elsewhere`: where records go if the last checkpoint was saved to another place because
        this disk was full. Records that an earlier session left there are read."""
        self.path, self.elsewhere = path, elsewhere
        self.kept: list[bytes] = []
        """Records that may not be on disk yet, oldest first."""
        self.num_written = 0
        """How many of them are written to the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if elsewhere is not None and elsewhere.is_file():
            self.kept.append(elsewhere.read_bytes())

    @property
    def is_new(self) -> bool:
        return not self.path.exists() and not self.kept

    def mark(self, step: int, batch: int, leaves_out: bool = False) -> str:
        """Records that the model is that of `step`, so that later steps are void, and that `batch`
        comes next."""
        return self.add(step, batch, np.zeros((0, int(leaves_out)), np.int64))

    def add(self, step: int, batch: int, rows: Digests) -> str:
        """Records that steps `step`, `step + 1`, … consumed batches `batch`, `batch + 1`, …
        Returns why this cannot be written, if it cannot."""
        body = rows.astype("<i8").tobytes()
        check = zlib.crc32(PLACE.pack(step, batch, *rows.shape) + body)
        self.kept.append(HEAD.pack(MAGIC, check, step, batch, *rows.shape) + body)
        return self.sync() if sum(map(len, self.kept)) > KEPT_BYTES else self._write()

    def sync(self) -> str:
        """Syncs the file, so that it survives a power cut, or returns why that failed."""
        if problem := self._write():
            return problem
        try:
            sync(self.path)
        except OSError as error:
            self.num_written = 0  # any record may be lost, so all are written again
            return self._words(error, self.path)
        self.kept, self.num_written = [], 0
        if self.elsewhere is not None:
            with suppress(OSError):
                self.elsewhere.unlink()
        return ""

    def sync_elsewhere(self) -> str:
        """Writes the records that may not be on disk to the other place."""
        assert self.elsewhere is not None
        try:
            self.elsewhere.parent.mkdir(parents=True, exist_ok=True)
            with new_file(self.elsewhere) as file:
                file.write(b"".join(self.kept))
        except OSError as error:
            return self._words(error, self.elsewhere)
        return ""

    def _write(self) -> str:
        try:
            while self.num_written < len(self.kept):
                append(self.path, self.kept[self.num_written])
                self.num_written += 1
        except OSError as error:
            return self._words(error, self.path)
        return ""

    def _words(self, error: OSError, path: Path) -> str:
        return f"{path} cannot be written: {error.strerror}"
