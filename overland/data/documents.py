"""Which documents come when, window by window.

Per epoch a corpus's shards are permuted, and some that follow each other form a *window*: as much
as is worth mixing and small enough to hold ready. Inside it documents are permuted again. A mixture
by rows takes its documents from several such streams in turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from overland.data.corpus import Corpus
from overland.data.counts import Counts
from overland.data.holdout import held_out
from overland.data.order import permute
from overland.data.ranges import spread
from overland.data.schedule import Schedule
from overland.data.shard import Shard
from overland.data.sources.marks import digest_of
from overland.errors import DataError

Array = npt.NDArray[np.int64]
FORMAT = 1  # part of every key; counts up when the same plan comes to mean another order
MAX_SHARDS = 128  # in a window, where documents are large: each keeps a file open
LOOK_AHEAD = 2  # windows that are made ready beyond the one that is read
OPEN_WINDOWS = 3  # a batch that spans windows comes back to each of them
COUNTED_AT_ONCE = 4096  # windows, where counting needs no look at the tokens
EPOCHS_AT_ONCE = 64
LEAST_MIXED = 1000  # documents in a window of a mixture by rows, if `window_documents` allows


class Exhausted(DataError):
    """A source that may not be read once more."""


@dataclass(frozen=True)
class Documents:
    """Documents in the order in which they are taken, and where the tokens of each lie. One of
    arrays has the length 1, and starts at its place in its file."""

    files: list[Shard]
    file: Array
    start: Array
    length: Array
    source: Array
    """Number of the source, in the order of the plan."""
    number: Array
    """Its place in its source: shard × 2³² + place in the shard."""
    offset: Array
    """Tokens of it that are not here but come before: none, unless it is a rest."""
    borrowed: npt.NDArray[np.bool_]
    """Whether its last token is here only to be predicted: where a rest borders on a block that was
    read, that block has given the token to the model."""
    epoch: Array
    """How often it was read before."""

    def __len__(self) -> int:
        return len(self.length)

    def __getitem__(self, which: Array | slice) -> Documents:
        columns = (self.file, self.start, self.length, self.source, self.number, self.offset)
        file, start, length, source, number, offset = (values[which] for values in columns)
        borrowed, epoch = self.borrowed[which], self.epoch[which]
        return Documents(self.files, file, start, length, source, number, offset, borrowed, epoch)

    def numbers(self, which: Array) -> tuple[Array, Array]:
        """Of some documents a number that no other has, source × 2⁵⁶ + number, and the epoch."""
        return (self.source[which] << 56) + self.number[which], self.epoch[which]


class Windows(Protocol):
    """Windows of documents, numbered from 0, without an end."""

    key: str
    """Of everything that decides what a window holds."""
    per_epoch: int

    def open(self, window: int) -> Documents: ...

    def num_tokens(self, first: int) -> Array | None:
        """Of windows `first`, `first + 1`, …, where that is known without opening them."""


@dataclass(frozen=True)
class Reading:
    """How corpora are read, whatever is made of them."""

    seed: int = 0
    shuffle: bool = True
    window_documents: int = 100_000
    memory: Path | None = None
    """Folder for counts of what windows hold."""
    writes: bool = False
    """Whether this process adds to them; one does."""
    held_out: bool = False
    """Whether the documents that `data.holdout` keeps out of training are read, and no others."""

    def counts(self, name: str, count: Callable[[int], npt.ArrayLike], per_epoch: int) -> Counts:
        path = self.memory / f"{name}.counts" if self.memory is not None else None
        return Counts(count, per_epoch, path, self.writes)


class SourceWindows:
    """Windows of one corpus, epoch after epoch, up to `max_epochs`."""

    def __init__(
        self,
        name: str,
        source: int,
        corpus: Corpus,
        reading: Reading,
        max_epochs: int | None = None,
        holdout: float = 0.0,
    ) -> None:
        """`name` and number as the plan has them: a corpus may be found under another name.
        `holdout` is the share of documents that is kept out of training."""
        self.name, self.source, self.corpus = name, source, corpus
        self.reading, self.max_epochs, self.holdout = reading, max_epochs, holdout
        self.announced = corpus.num_shards * corpus.documents_per_shard
        wanted = max(self.announced // reading.window_documents, corpus.num_shards // MAX_SHARDS, 1)
        self.per_epoch = int(min(wanted, max(corpus.num_shards, 1)))
        parts = [FORMAT, name, corpus.fingerprint, reading.seed, reading.shuffle, self.per_epoch]
        self.key = digest_of([*parts, holdout, reading.held_out] if holdout else parts)
        self._opened: OrderedDict[int, Documents] = OrderedDict()
        self._sums_of: OrderedDict[int, Array] = OrderedDict()
        # Documents and tokens per shard, as far as they are known: all of a corpus that is built,
        # and after an epoch of any other.
        self._sizes = np.full((corpus.num_shards, 2), -1, np.int64)
        self._documents = reading.counts(f"documents-{self.key}", self._count, self.per_epoch)
        self._tokens = reading.counts(f"tokens-{self.key}", self._count_tokens, self.per_epoch)

    def open(self, window: int) -> Documents:
        if window not in self._opened:
            self.check_epoch(window)
            self.corpus.expect(self._shards(self._until(window, 1 + LOOK_AHEAD)).tolist())
            self._opened[window] = self._open(window)
            while len(self._opened) > OPEN_WINDOWS:
                self._opened.popitem(last=False)
        self._opened.move_to_end(window)
        return self._opened[window]

    def take(self, first: int, last: int) -> list[Documents]:
        """Documents [first, last) of the stream, in parts."""
        if first == last:
            return []
        (window, end), (place, _) = self._documents.find([first, last - 1])
        parts, left = [], last - first
        for number in range(window, end + 1):
            part = self.open(number)[place : place + left]
            parts.append(part)
            left, place = left - len(part), 0
        return parts

    def holds(self, count: int) -> bool:
        """Whether the stream has so many documents."""
        try:
            self._documents.find([max(count - 1, 0)])
        except Exhausted:
            return False
        return True

    def num_documents(self) -> int:
        """Of a stream that is exhausted."""
        assert self.max_epochs is not None
        return self._documents.total(self.max_epochs * self.per_epoch)

    def num_tokens(self, first: int) -> Array | None:
        return self._sums(first, 1)

    def tokens_before(self, document: int) -> int:
        """In the first so many documents of the stream."""
        if document == 0:
            return 0
        (window,), (place,) = self._documents.find([document - 1])
        if window not in self._sums_of:
            self._sums_of[window] = np.cumsum(self.open(int(window)).length)
            if len(self._sums_of) > OPEN_WINDOWS:
                self._sums_of.popitem(last=False)
        return self._tokens.total(int(window)) + int(self._sums_of[window][place])

    def _count(self, first: int) -> npt.ArrayLike:
        known = self._sums(first, 0)
        return [len(self.open(first))] if known is None else known

    def _count_tokens(self, first: int) -> npt.ArrayLike:
        known = self._sums(first, 1)
        return [self.open(first).length.sum()] if known is None else known

    def _sums(self, first: int, column: int) -> Array | None:
        """Documents or tokens per window, from the sizes of shards, where all are known."""
        self.check_epoch(first)
        if self._sizes[-1, 0] < 0 and not self.holdout:
            built = self.corpus.sizes()
            self._sizes = self._sizes if built is None else built
        if self.per_epoch == 1:  # whatever the order, it is all of it
            total = int(self._sizes[:, column].sum())
            is_known = bool((self._sizes[:, 0] >= 0).all())
            return np.full(len(self._until(first, EPOCHS_AT_ONCE)), total) if is_known else None
        end_of_epoch = (first // self.per_epoch + 1) * self.per_epoch
        windows = np.arange(first, min(first + COUNTED_AT_ONCE, end_of_epoch))
        widths = np.diff(self._places(windows), axis=0)[0]
        starts = np.cumsum(widths) - widths
        sizes = np.asarray(self._sizes[self._shards(windows), column])
        return np.add.reduceat(sizes, starts) if sizes.min() >= 0 else None

    def _until(self, first: int, count: int) -> Array:
        """So many windows from `first` on, or as many as there will be."""
        last = first + count
        if self.max_epochs is not None:
            last = min(last, self.max_epochs * self.per_epoch)
        return np.arange(first, last)

    def _places(self, windows: Array) -> tuple[Array, Array]:
        """Windows of an epoch share its shards out evenly."""
        window, total = windows % self.per_epoch, self.corpus.num_shards
        return window * total // self.per_epoch, (window + 1) * total // self.per_epoch

    def _shards(self, windows: Array) -> Array:
        """The shards of some windows in a row, one window after the other."""
        first, last = self._places(windows)
        which, places = spread(first, last - first)
        if not self.reading.shuffle:
            return places
        epochs = (windows // self.per_epoch)[which]
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            places[now] = self._permute(places[now], self.corpus.num_shards, "shards", epoch)
        return places

    def _open(self, window: int) -> Documents:
        numbers = self._shards(np.array([window]))
        shards = [self.corpus.shard(number) for number in numbers.tolist()]
        counts = np.array([shard.info.num_documents for shard in shards])
        total = int(counts.sum())
        file, place = spread(np.zeros_like(counts), counts)
        if self.corpus.arrays is not None:
            start, length = place, np.ones(total, np.int64)
        else:
            start = np.concatenate([shard.offsets[:-1] for shard in shards]).astype(np.int64)
            length = np.concatenate([np.diff(shard.offsets) for shard in shards]).astype(np.int64)
        all_ = Documents(
            shards,
            file,
            start,
            length,
            np.full(total, self.source, np.int64),
            (numbers[file] << 32) + place,
            np.zeros(total, np.int64),
            np.zeros(total, bool),
            np.full(total, window // self.per_epoch),
        )
        if self.holdout:
            all_ = all_[self._on_this_side(numbers)]
            total = len(all_)
        if self._sizes.flags.writeable:
            kept = np.bincount(all_.file, minlength=len(numbers))
            tokens = np.bincount(all_.file, all_.length, minlength=len(numbers))
            self._sizes[numbers] = np.stack([kept, tokens.astype(np.int64)], axis=1)
            self._check_any()
        if not self.reading.shuffle or not total:
            return all_
        return all_[self._permute(np.arange(total), total, "documents", window)]

    def _on_this_side(self, shards: Array) -> Array:
        """The documents of some shards that are held out, or those that are not."""
        held = [held_out(self.corpus, number, self.holdout) for number in shards.tolist()]
        return np.flatnonzero(np.concatenate(held) == self.reading.held_out)

    def _check_any(self) -> None:
        """Once all shards were seen, there must have been something in them to read."""
        if self.holdout and (self._sizes[:, 0] == 0).all():
            side = "no document" if self.reading.held_out else "every document"
            raise DataError(
                f"data.holdout keeps {side} of {self.name} out of training (a share of "
                f"{self.holdout:.3g}): change it"
            )

    def _permute(self, places: Array, size: int, what: str, number: int) -> Array:
        return permute(places, size, what, self.reading.seed, self.name, number)

    def check_epoch(self, window: int) -> None:
        if self.max_epochs is not None and window // self.per_epoch >= self.max_epochs:
            times = "time" if self.max_epochs == 1 else "times"
            raise Exhausted(
                f"{self.name} has been read {self.max_epochs} {times}, as often as its "
                f"max_epochs allows: raise that, lower its weight, or train for fewer steps"
            )


class MixedWindows:
    """A mixture by rows: documents of several sources in turn, some at a time.

    A window is at most as long as it takes until a source begins anew, so that its epochs do not
    run into each other there; but a tiny source with a large weight must not make windows tiny.
    """

    def __init__(
        self,
        sources: Sequence[SourceWindows],
        schedule: Schedule,
        reading: Reading,
        starts: Sequence[int],
    ) -> None:
        """`starts`: documents that each source has given before."""
        self.sources, self.schedule, self.starts = sources, schedule, list(starts)
        # A source without turns does not enter: one that joins later changes nothing before.
        parts = zip(sources, schedule.shares, self.starts, strict=True)
        used = [(source, share, start) for source, share, start in parts if share]
        epoch = min(int(source.announced * schedule.period / share) for source, share, _ in used)
        self.size = min(reading.window_documents, max(epoch, LEAST_MIXED))
        self.per_epoch = max(source.per_epoch for source, _, _ in used)
        self.key = digest_of([self.size, [[one.key, share, start] for one, share, start in used]])

    def open(self, window: int) -> Documents:
        first, last = self._turns(window)
        whose = self.schedule.whose(np.arange(first, last))
        parts, places = [], []
        for number, source in enumerate(self.sources):
            parts += source.take(self._given(first)[number], self._given(last)[number])
            places.append(np.flatnonzero(whose == number))
        return _joined(parts)[np.argsort(np.concatenate(places), kind="stable")]

    def taken(self, window: int) -> list[int]:
        """How many documents each source has given before this window."""
        return self._given(window * self.size)

    def num_tokens(self, first: int) -> Array | None:
        """Without putting the documents together."""
        begin, end = (self._given(turn) for turn in self._turns(first))
        parts = (
            source.tokens_before(last) - source.tokens_before(first)
            for source, first, last in zip(self.sources, begin, end, strict=True)
            if last > first
        )
        return np.array([sum(parts)])

    def _given(self, turns: int) -> list[int]:
        given = self.schedule.before(turns).tolist()
        return [start + count for start, count in zip(self.starts, given, strict=True)]

    def _turns(self, window: int) -> tuple[int, int]:
        """Those of a window; the last one ends where a source has no more to give."""
        first = last = window * self.size
        last += self.size
        for number, source in enumerate(self.sources):
            if source.max_epochs is not None and not source.holds(self._given(last)[number]):
                left = source.num_documents() - self.starts[number]
                last = min(last, self.schedule.until(number, left))
                if last <= first:
                    source.check_epoch(source.max_epochs * source.per_epoch)
        return first, last


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
