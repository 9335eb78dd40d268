"""The order of samples: keyed permutations for shuffling, the number of items in each window, and
the turns of the sources in a mixture, in exact proportion to their weights (from plan.py).

A Feistel network permutes [0, 4^k); indices that fall outside [0, n) are permuted again until they
land inside (at most about four times on average). The place of one sample among trillions therefore
costs a few multiplications and is never stored, and every rank, restart and session computes the
same one.

`Counts` finds the window of item n, and its place there. Those who read windows count them, in
order and only as far as needed, and add the counts. A count is a function of the plan, but
computing it may mean tokenizing the window, so the run folder stores known counts: a resume at step
10⁶ reads a table and opens one window. The table is only a cache: a record that is missing or torn
is counted again.

`Mixture` decides which of several sources' turn it is, by their weights, with exact proportions at
every moment. The j-th turn of a source with share w of all turns is due in [j/w, (j+1)/w). Each
turn goes to the source with the earliest deadline among those that are due, which always works out:
after n turns, every source has had n·w of them, rounded down or up. (Rounding n·w by largest
remainder separately for each n would not work: from one n to the next, a source can lose a turn
that it has had.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm
from pathlib import Path

import numpy as np
import numpy.typing as npt

from overland.errors import DataError

Indices = npt.NDArray[np.uint64]
ROUNDS = 6
GROUPS_AT_ONCE = 64  # sorted together: enough for similar lengths, and most of the order is random
Array = npt.NDArray[np.int64]
# Calls to count windows that one item may need: seconds if a call knows many windows, minutes if it
# opens one. Training never needs more than a few, since it counts on from where it is.
MOST_CALLS = 200_000
MAX_PERIOD = 100_000  # shares are exact if they have a common denominator up to this, else rounded
RECORD = np.dtype([("count", "<i8"), ("check", "<u4")])


def permute(indices: npt.ArrayLike, size: int, *key: object) -> npt.NDArray[np.int64]:
    """Returns where each of `indices` goes in the permutation of [0, size) that `key` names."""
    places = np.array(indices, dtype=np.uint64, ndmin=1)
    if size <= 0 or (places >= size).any():
        raise IndexError(f"indices must lie in [0, {size})")
    if size == 1:
        return places.astype(np.int64)
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
    round_keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    todo = np.ones(places.shape, dtype=bool)
    while todo.any():
        places[todo] = _feistel(places[todo], half_bits, round_keys)
        todo = places >= size
    return places.astype(np.int64)


def group_alike(
    order: Array, lengths: Array, first: int, size: int, key: tuple[object, ...]
) -> Array:
    """Reorders items so that the items in each group of `size` have similar lengths; `lengths` are
    those of the items in the given order. The first group ends after `first` items. The order of
    the groups stays random, and so do their members, among `GROUPS_AT_ONCE` groups."""
    at_once = size * GROUPS_AT_ONCE
    number = (np.arange(len(order)) - first) // at_once
    alike = order[np.lexsort((lengths, number))]
    count = max(0, len(order) - first) // size
    if count < 2:
        return alike
    whole = alike[first : first + count * size].reshape(count, size)
    whole = whole[permute(np.arange(count), count, *key)]
    return np.concatenate((alike[:first], whole.reshape(-1), alike[first + count * size :]))


def _feistel(places: Indices, half_bits: int, round_keys: Indices) -> Indices:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = places >> shift, places & mask
    for key in round_keys:
        left, right = right, left ^ (mix64(right ^ key) & mask)
    return (left << shift) | right


def mix64(x: Indices) -> Indices:
    """The finalizer of splitmix64: every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Counts:
    """The numbers of items in the windows that are counted. If `per_epoch` consecutive windows are
    empty, there is nothing to read."""

    def __init__(self, per_epoch: int, path: Path | None = None, writes: bool = False) -> None:
        self._per_epoch = per_epoch
        self._path, self._where = (path if writes else None), path
        known = _read(path) if path is not None else np.zeros(0, np.int64)
        self.num_known = len(known)
        """The number of windows that are counted."""
        self._counted, self._at_once = 0, 1  # windows so far, and per call, without known ones
        self._ends = np.cumsum(known)  # room beyond `num_known` is not valid

    def find(self, numbers: npt.ArrayLike) -> tuple[Array, Array] | None:
        """Returns the window of each item, and its place there, or None if further windows have to
        be counted first."""
        items = np.asarray(numbers, np.int64)
        if items.size and self.total(self.num_known) <= items.max():
            self._check_reach(int(items.max()))
            return None
        windows = np.searchsorted(self._ends[: self.num_known], items, side="right")
        return windows, items - np.where(windows > 0, self._ends[windows - 1], 0)

    def check(self, window: int, count: int) -> None:
        """Raises an error if the size of a window differs from its count."""
        if window < self.num_known and self.total(window + 1) - self.total(window) != count:
            raise DataError(
                f"window {window} has {count} items, but {self._where} says otherwise: delete that "
                f"file, and it will be written again"
            )

    def total(self, windows: int) -> int:
        """Returns the number of items in the first `windows` windows, as far as they are
        counted."""
        windows = min(windows, self.num_known)
        return int(self._ends[windows - 1]) if windows else 0

    def _check_reach(self, item: int) -> None:
        """Raises an error if counting up to an item would take hours. How many windows a call
        counts shows only after an epoch, when the sizes of all shards are known."""
        total = self.total(self.num_known)
        if self._counted < 2 * self._per_epoch or not total:
            return
        windows = (item - total) * self.num_known // total
        if windows > MOST_CALLS * self._at_once:
            epochs = (self.num_known + windows) // self._per_epoch
            raise DataError(
                f"this step is about {epochs:,} epochs into the data, too far ahead to locate: "
                "choose an earlier step"
            )

    def add(self, counts: npt.ArrayLike) -> None:
        """Adds the counts of the windows that follow those that are known: one or more."""
        new, known = np.asarray(counts, np.int64), self.num_known
        self._counted, self._at_once = self._counted + len(new), max(self._at_once, len(new))
        total = self.total(known)
        if known + len(new) > len(self._ends):
            room = np.zeros(max(len(new), len(self._ends) // 2, 64), np.int64)
            self._ends = np.concatenate((self._ends[:known], room))
        self._ends[known : known + len(new)] = total + np.cumsum(new)
        self.num_known += len(new)
        before = self.num_known - self._per_epoch
        if before >= 0 and self.total(self.num_known) == self.total(before):
            raise DataError("there is nothing to read: a whole epoch has not a single block")
        if self._path is not None:
            _append(self._path, known, new)


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
    """Writes records at their offsets, overwriting what a torn write left behind."""
    records = np.empty(len(counts), RECORD)
    records["count"], records["check"] = counts, _checks(first, counts)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(first * RECORD.itemsize)
        file.write(records.tobytes())
        file.truncate()


def _checks(first: int, counts: Array) -> npt.NDArray[np.uint32]:
    """Returns a checksum for each record, of its place and its content."""
    places = np.arange(first, first + len(counts), dtype=np.uint64)
    mixed = (places + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ counts.astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(32)).astype(np.uint32)


def spread(first: Array, count: Array) -> tuple[Array, Array]:
    """Returns all values of the ranges [first, first + count), one range after another: the number
    of the range, and the value."""
    which = np.repeat(np.arange(len(first)), count)
    before = np.cumsum(count) - count
    return which, np.arange(len(which)) - before[which] + first[which]


def groups(values: Array) -> Iterator[tuple[int, Array]]:
    """Yields each value and its places. Usually there is only one, which is fast."""
    if len(values) and (values == values[0]).all():
        yield int(values[0]), np.arange(len(values))
        return
    for value in np.unique(values).tolist():
        yield value, np.flatnonzero(values == value)


class Mixture:
    """Turns of `len(weights)` sources, which repeat after `period`. Weights need not add up to 1;
    a source of weight 0 gets no turns."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = shares_of(weights)
        self.period = sum(self.shares)
        self._turns = _turns(self.shares)
        is_turn = self._turns[None] == np.arange(len(self.shares))[:, None]
        self._before = np.zeros((len(self.shares), self.period + 1), np.int64)
        np.cumsum(is_turn, axis=1, out=self._before[:, 1:])

    def whose(self, turns: npt.ArrayLike) -> Array:
        """Returns the source that each of `turns` belongs to."""
        return self._turns[np.asarray(turns) % self.period].astype(np.int64)

    def before(self, turn: int) -> Array:
        """Returns how many of the first `turn` turns each source has had."""
        rounds, rest = divmod(turn, self.period)
        return rounds * np.asarray(self.shares) + self._before[:, rest]

    def until(self, source: int, count: int) -> int:
        """Returns the number of turns before turn `count` (from 0) of a source."""
        rounds, rest = divmod(count, self.shares[source])
        return rounds * self.period + int(np.searchsorted(self._before[source], rest, "right")) - 1

    def places(self, turns: Array) -> Array:
        """Returns, for each of `turns`, how many turns its source has had before."""
        rounds, rests = np.divmod(turns, self.period)
        whose = self.whose(turns)
        return rounds * np.asarray(self.shares)[whose] + self._before[whose, rests]


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the smallest whole numbers that are exactly proportional to the weights."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    if not exact or min(exact) < 0 or total == 0:
        raise DataError(f"weights must not be negative or all 0: {list(weights)}")
    parts = [weight / total for weight in exact]
    period = lcm(*(part.denominator for part in parts))
    if period > MAX_PERIOD:
        return _rounded(parts, MAX_PERIOD)
    return tuple(int(part * period) for part in parts)


def _rounded(parts: list[Fraction], period: int) -> tuple[int, ...]:
    """Rounds by largest remainder, but a source with a weight keeps at least one turn."""
    shares = [max(int(part * period), int(part > 0)) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: shares[i] - parts[i] * period)
    for i in by_remainder[: max(0, period - sum(shares))]:
        shares[i] += 1
    return tuple(shares)


@lru_cache(maxsize=32)
def _turns(shares: tuple[int, ...]) -> npt.NDArray[np.int16]:
    period = sum(shares)
    active = [(source, share) for source, share in enumerate(shares) if share]
    due = {source: (0, -(-period // share)) for source, share in active}  # release, deadline
    had = dict.fromkeys(due, 0)
    turns = np.empty(period, np.int16)
    for turn in range(period):
        ready = (source for source in due if due[source][0] <= turn)
        source = min(ready, key=lambda one: (due[one][1], one))
        had[source] = j = had[source] + 1
        share = shares[source]
        due[source] = (j * period // share, -(-(j + 1) * period // share))
        turns[turn] = source
    return turns
