"""Mixes sources by weight: decides whose turn it is, with exact proportions at every moment.

The j-th turn of a source with share w of all turns is due in [j/w, (j+1)/w). Each turn goes to the
source with the earliest deadline among those that are due, which always works out: after n turns,
every source has had n·w of them, rounded down or up. (Rounding n·w by largest remainder separately
for each n would not work: from one n to the next, a source can lose a turn that it has had.)

A mixture of sequences takes blocks in these turns. A mixture of documents is `MixedWindows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm

import numpy as np
import numpy.typing as npt

from overland.data.sources.file_marks import digest_of
from overland.data.windows import Documents, Reading, SourceWindows
from overland.errors import DataError

LEAST_MIXED = 1000  # documents in a window of such a mixture, if `window_documents` allows
MAX_PERIOD = 100_000  # shares are exact if they have a common denominator up to this, else rounded

Array = npt.NDArray[np.int64]


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


class MixedWindows:
    """A mixture of documents of several sources in turn, a window at a time.

    A window ends at the latest when a source would start over, so that its epochs do not mix
    there; but a tiny source with a large weight must not make windows tiny.
    """

    name: str | None = None

    def __init__(
        self,
        sources: Sequence[SourceWindows],
        mixture: Mixture,
        reading: Reading,
        starts: Sequence[int],
    ) -> None:
        """`starts`: documents already taken from each source."""
        self.sources, self.mixture, self.starts = sources, mixture, list(starts)
        # A source without turns is left out, so that one that joins later changes nothing before.
        parts = zip(sources, mixture.shares, self.starts, strict=True)
        used = [(source, share, start) for source, share, start in parts if share]
        epoch = min(int(source.announced * mixture.period / share) for source, share, _ in used)
        self.size = min(reading.window_documents, max(epoch, LEAST_MIXED))
        self.per_epoch = max(source.per_epoch for source, _, _ in used)
        self.key = digest_of([self.size, [[one.key, share, start] for one, share, start in used]])

    def open(self, window: int) -> Documents:
        first, last = self._turns(window)
        whose = self.mixture.whose(np.arange(first, last))
        parts, places = [], []
        for number, source in enumerate(self.sources):
            parts += source.take(self._given(first)[number], self._given(last)[number])
            places.append(np.flatnonzero(whose == number))
        return _joined(parts)[np.argsort(np.concatenate(places), kind="stable")]

    def taken(self, window: int) -> list[int]:
        """Returns how many documents are taken from each source before this window."""
        return self._given(window * self.size)

    def num_tokens(self, first: int) -> Array | None:
        """Counts the tokens of a window without assembling its documents."""
        begin, end = (self._given(turn) for turn in self._turns(first))
        parts = (
            source.tokens_before(last) - source.tokens_before(first)
            for source, first, last in zip(self.sources, begin, end, strict=True)
            if last > first
        )
        return np.array([sum(parts)])

    def _given(self, turns: int) -> list[int]:
        given = self.mixture.before(turns).tolist()
        return [start + count for start, count in zip(self.starts, given, strict=True)]

    def _turns(self, window: int) -> tuple[int, int]:
        """Returns the turns of a window; the last window ends when a source is exhausted."""
        first = last = window * self.size
        last += self.size
        for number, source in enumerate(self.sources):
            if source.max_epochs is not None and not source.holds(self._given(last)[number]):
                left = source.num_documents() - self.starts[number]
                last = min(last, self.mixture.until(number, left))
                if last <= first:
                    source.check_epoch(source.max_epochs * source.per_epoch)
        return first, last


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


def _joined(parts: Sequence[Documents]) -> Documents:
    shifts = np.cumsum([0, *(len(part.files) for part in parts)]).tolist()
    return Documents(
        [file for part in parts for file in part.files],
        np.concatenate([part.file + shift for part, shift in zip(parts, shifts, strict=False)]),
        np.concatenate([part.start for part in parts]),
        np.concatenate([part.length for part in parts]),
        np.concatenate([part.source for part in parts]),
        np.concatenate([part.number for part in parts]),
        np.concatenate([part.offset for part in parts]),
        np.concatenate([part.borrowed for part in parts]),
        np.concatenate([part.epoch for part in parts]),
    )
