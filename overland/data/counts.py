"""How many items each window holds: which window item n lies in, and which place it has there.

Windows are counted in order, as far as anyone has asked. A count is a function of the plan, but
finding it may mean tokenising the window, so the run folder keeps what is known: a resume at step
10⁶ reads a table and opens one window. The table is only a memory: a record that is missing or torn
is counted again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from overland.errors import DataError

Array = npt.NDArray[np.int64]
RECORD = np.dtype([("count", "<i8"), ("check", "<u4")])


class Counts:
    """`count(first)` says how much windows `first`, `first + 1`, … hold: one of them or more, as is
    cheap. After `per_epoch` windows in a row without an item there is nothing to be found."""

    def __init__(
        self,
        count: Callable[[int], npt.ArrayLike],
        per_epoch: int,
        path: Path | None = None,
        writes: bool = False,
    ) -> None:
        self._count, self._per_epoch = count, per_epoch
        self._path, self._where = (path if writes else None), path
        known = _read(path) if path is not None else np.zeros(0, np.int64)
        self._num_stored = len(known)
        self._known = len(known)
        self._ends = np.cumsum(known)  # room beyond `_known` is not valid

    @property
    def num_known(self) -> int:
        """Windows that are counted."""
        return self._known

    def find(self, numbers: npt.ArrayLike) -> tuple[Array, Array]:
        """The window and the place in it of each item."""
        items = np.asarray(numbers, np.int64)
        while items.size and self.total(self._known) <= items.max():
            self._extend()
        windows = np.searchsorted(self._ends[: self._known], items, side="right")
        return windows, items - np.where(windows > 0, self._ends[windows - 1], 0)

    def check(self, window: int, count: int) -> None:
        """What a window really holds is what was counted."""
        if window < self._known and self.total(window + 1) - self.total(window) != count:
            raise DataError(
                f"window {window} holds {count}, where {self._where} says otherwise: delete that "
                f"file, it is made again"
            )

    def total(self, windows: int) -> int:
        """Items in the first `windows` windows."""
        while self._known < windows:
            self._extend()
        return int(self._ends[windows - 1]) if windows else 0

    def total_up_to(self, windows: int, enough: int) -> int:
        """Items in the first `windows` windows, or `enough` if there are that many; then it counts
        no further."""
        while self._known < windows and self.total(self._known) < enough:
            self._extend()
        return min(self.total(min(self._known, windows)), enough)

    def _extend(self) -> None:
        new = np.asarray(self._count(self._known), np.int64)
        total = int(self._ends[self._known - 1]) if self._known else 0
        if self._known + len(new) > len(self._ends):
            room = np.zeros(max(len(new), len(self._ends) // 2, 64), np.int64)
            self._ends = np.concatenate((self._ends[: self._known], room))
        self._ends[self._known : self._known + len(new)] = total + np.cumsum(new)
        self._known += len(new)
        before = self._known - self._per_epoch
        if before >= 0 and self.total(self._known) == (self._ends[before - 1] if before else 0):
            raise DataError("there is nothing to read: a whole epoch holds not one block")
        if self._path is not None:
            _append(self._path, self._num_stored, new)
            self._num_stored += len(new)


def _read(path: Path) -> Array:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return np.zeros(0, np.int64)
    records = np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)
    counts: Array = records["count"].astype(np.int64)
    good = _checks(0, counts) == records["check"]
    return counts if good.all() else counts[: int(np.argmin(good))]


def _append(path: Path, first: int, counts: Array) -> None:
    """Written where it belongs: what a torn record left behind is overwritten."""
    records = np.empty(len(counts), RECORD)
    records["count"], records["check"] = counts, _checks(first, counts)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(first * RECORD.itemsize)
        file.write(records.tobytes())
        file.truncate()


def _checks(first: int, counts: Array) -> npt.NDArray[np.uint32]:
    """A check per record, of its place and its content."""
    places = np.arange(first, first + len(counts), dtype=np.uint64)
    mixed = (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ counts.astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(32)).astype(np.uint32)
