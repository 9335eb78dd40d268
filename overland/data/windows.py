"""The order of documents: shuffles shards and groups them into windows, shuffles the documents in
each, alternates the sources of a mixture, and ends a source after its `max_epochs`.

In each epoch, the shards of a corpus are permuted, and consecutive ones form a *window*: large
enough to mix well, and small enough to keep ready. Inside it, documents are permuted again. The
windows of a mixture of documents take those of several sources in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from overland.data.corpus import Corpus, DamagedSizes
from overland.data.order import Counts, Mixture, groups, permute, spread
from overland.data.plan import PlannedSource
from overland.data.shard import Shard
from overland.data.sources.file_marks import digest_of
from overland.errors import DataError

Array = npt.NDArray[np.int64]
FORMAT = 1  # part of every key; increased when the same plan gives another order
MAX_SHARDS = 128  # in a window of large documents: each keeps a file open
LOOK_AHEAD = 2  # windows that are prepared beyond the current one
OPEN_WINDOWS = 3  # a batch that spans windows returns to each of them
COUNTED_AT_ONCE = 4096  # windows, if counting does not have to read the tokens
EPOCHS_AT_ONCE = 64
DOCUMENTS, TOKENS = 0, 1  # columns of the sizes of shards
LEAST_MIXED = 1000  # documents in a window of a mixture, if `window_documents` allows


class Exhausted(DataError):
    """Raised when a source has been read as many times as its max_epochs allows."""

    def __init__(self, name: str | None, max_epochs: int) -> None:
        times = "time" if max_epochs == 1 else "times"
        super().__init__(
            f"{name} has been read {max_epochs} {times}, the limit set by its max_epochs: raise "
            "it, lower the source's weight, or train for fewer steps"
        )


@dataclass(frozen=True)
class Documents:
    """Documents in the order in which they are read, and the location of their tokens. A sample of
    arrays has length 1, and starts at its place in its file."""

    files: list[Shard]
    file: Array
    start: Array
    length: Array
    source: Array
    """The number of the source, in the order of the plan."""
    number: Array
    """Its place in its source: shard × 2³² + place in the shard."""
    offset: Array
    """The number of its tokens that come before this part: 0, unless it is a rest."""
    borrowed: npt.NDArray[np.bool_]
    """Whether its last token is here only to be predicted: the model has already read it, as the
    first token of a block that followed this rest."""
    epoch: Array
    """How many times it was read before."""

    def __len__(self) -> int:
        return len(self.length)

    def __getitem__(self, which: Array | slice) -> Documents:
        names = (one.name for one in fields(self) if one.name != "files")
        return Documents(self.files, **{name: getattr(self, name)[which] for name in names})

    def numbers(self, which: Array) -> tuple[Array, Array]:
        """Returns a unique number for each document, source × 2⁵⁶ + number, and its epoch."""
        return (self.source[which] << 56) + self.number[which], self.epoch[which]


@dataclass(frozen=True)
class Reading:
    """How corpora are read, whatever they are used for."""

    seed: int = 0
    shuffle: bool = True
    window_documents: int = 100_000
    memory: Path | None = None
    """Folder that stores the counts of windows."""
    writes: bool = False
    """Whether this process writes them; only one does."""
    held_out: bool = False
    """Whether to read only the documents that `data.holdout` holds out of training."""

    def counts(self, name: str, per_epoch: int) -> Counts:
        path = self.memory / f"{name}.counts" if self.memory is not None else None
        return Counts(per_epoch, path, self.writes)


class SourceWindows:
    """An endless sequence of windows of one corpus, numbered from 0: epoch after epoch, up to
    `max_epochs`."""

    def __init__(
        self,
        name: str,
        source: int,
        corpus: Corpus,
        reading: Reading,
        planned: PlannedSource,
    ) -> None:
        """`name` and number are those of the plan: the corpus may have another name."""
        self.name: str | None = name
        self.source, self.corpus = source, corpus
        self.reading, self.max_epochs = reading, planned.max_epochs
        self.holdout = holdout = planned.holdout
        self.announced = corpus.num_shards * corpus.documents_per_shard
        wanted = max(self.announced // reading.window_documents, corpus.num_shards // MAX_SHARDS, 1)
        self.per_epoch = int(min(wanted, max(corpus.num_shards, 1)))
        parts = [FORMAT, name, corpus.fingerprint, reading.seed, reading.shuffle, self.per_epoch]
        self.key = digest_of([*parts, holdout, reading.held_out] if holdout else parts)
        """Digest of everything that determines the content of a window."""
        self.open = lru_cache(OPEN_WINDOWS)(self._open)
        self._sums_of = lru_cache(OPEN_WINDOWS)(lambda window: np.cumsum(self.open(window).length))
        # Documents and tokens per shard, as far as they are known: all for a built corpus, and all
        # after one epoch of any other.
        self._sizes = np.full((corpus.num_shards, 2), -1, np.int64)
        self._counts = [
            reading.counts(f"{what}-{self.key}", self.per_epoch) for what in ("documents", "tokens")
        ]

    def take(self, first: int, last: int) -> list[Documents]:
        """Returns documents [first, last) of the stream, in parts."""
        if first == last:
            return []
        (window, end), (place, _) = self._find([first, last - 1])
        parts, left = [], last - first
        for number in range(window, end + 1):
            part = self.open(number)[place : place + left]
            parts.append(part)
            left, place = left - len(part), 0
        return parts

    def holds(self, count: int) -> bool:
        """Whether the stream has at least this many documents."""
        try:
            self._find([max(count - 1, 0)])
        except Exhausted:
            return False
        return True

    def num_documents(self) -> int:
        """Counts the documents of a finite stream."""
        assert self.max_epochs is not None
        return self._total(DOCUMENTS, self.max_epochs * self.per_epoch)

    def num_tokens(self, first: int) -> Array | None:
        """Counts the tokens of windows `first`, `first + 1`, …, if known without opening them."""
        return self._sums(first, TOKENS)

    def tokens_before(self, document: int) -> int:
        """Counts the tokens in the first `document` documents of the stream."""
        if document == 0:
            return 0
        (window,), (place,) = self._find([document - 1])
        return self._total(TOKENS, int(window)) + int(self._sums_of(int(window))[place])

    def _find(self, documents: list[int]) -> tuple[Array, Array]:
        """Returns the window of each document, and its place there."""
        while (found := self._counts[DOCUMENTS].find(documents)) is None:
            self._count_next(DOCUMENTS)
        return found

    def _total(self, column: int, windows: int) -> int:
        """Returns the number of documents or tokens in the first `windows` windows."""
        while self._counts[column].num_known < windows:
            self._count_next(column)
        return self._counts[column].total(windows)

    def _count_next(self, column: int) -> None:
        counts = self._counts[column]
        found = self._sums(counts.num_known, column)
        if found is None:
            documents = self.open(counts.num_known)
            found = np.array([len(documents) if column == DOCUMENTS else documents.length.sum()])
        counts.add(found)

    def _sums(self, first: int, column: int) -> Array | None:
        """Returns the documents or tokens per window, if the sizes of all its shards are known."""
        self.check_epoch(first)
        if self._sizes[-1, 0] < 0 and not self.holdout:
            built = self.corpus.sizes()
            self._sizes = self._sizes if built is None else built
        if self.per_epoch == 1:  # the order does not matter, since a window has all shards
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
        """Returns `count` windows from `first` on, or as many as there are."""
        last = first + count
        if self.max_epochs is not None:
            last = min(last, self.max_epochs * self.per_epoch)
        return np.arange(first, last)

    def _places(self, windows: Array) -> tuple[Array, Array]:
        """Returns where windows begin and end: they divide the shards of an epoch evenly."""
        window, total = windows % self.per_epoch, self.corpus.num_shards
        return window * total // self.per_epoch, (window + 1) * total // self.per_epoch

    def _shards(self, windows: Array) -> Array:
        """Returns the shards of consecutive windows, one window after another."""
        first, last = self._places(windows)
        which, places = spread(first, last - first)
        if not self.reading.shuffle:
            return places
        epochs = (windows // self.per_epoch)[which]
        for epoch, now in groups(epochs):
            places[now] = self._permute(places[now], self.corpus.num_shards, "shards", epoch)
        return places

    def _open(self, window: int) -> Documents:
        self.check_epoch(window)
        self.corpus.expect(self._shards(self._until(window, 1 + LOOK_AHEAD)).tolist())
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
            held_out = np.concatenate([shard.held_out(self.holdout) for shard in shards])
            all_ = all_[np.flatnonzero(held_out == self.reading.held_out)]
            total = len(all_)
        kept = np.bincount(all_.file, minlength=len(numbers))
        tokens = np.bincount(all_.file, all_.length, minlength=len(numbers))
        sizes = np.stack([kept, tokens.astype(np.int64)], axis=1)
        if self._sizes.flags.writeable:
            self._sizes[numbers] = sizes
            self._check_any()
        elif (self._sizes[numbers] != sizes).any():
            raise DamagedSizes(self.corpus.layout.sizes_path)
        if not self.reading.shuffle or not total:
            return all_
        return all_[self._permute(np.arange(total), total, "documents", window)]

    def _check_any(self) -> None:
        """Raises an error if all shards were read and none has a document on this side."""
        if self.holdout and (self._sizes[:, 0] == 0).all():
            side = "no document" if self.reading.held_out else "every document"
            raise DataError(
                f"data.holdout holds out {side} of {self.name} (a fraction of {self.holdout:.3g}): "
                f"change it"
            )

    def _permute(self, places: Array, size: int, what: str, number: int) -> Array:
        return permute(places, size, what, self.reading.seed, self.name, number)

    def check_epoch(self, window: int) -> None:
        if self.max_epochs is not None and window // self.per_epoch >= self.max_epochs:
            raise Exhausted(self.name, self.max_epochs)


class MixedWindows:
    """A mixture of documents of several sources in turn, a window at a time.

    A window ends at the latest when a source would start over, so that its epochs do not mix
    there; but a tiny source with a large weight must not make windows tiny.
    """

    name: str | None = None  # that of the source, if there is only one

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


def _joined(parts: Sequence[Documents]) -> Documents:
    """Returns the documents of all parts, one part after another."""
    shifts = np.cumsum([0, *(len(part.files) for part in parts)]).tolist()
    columns = {
        one.name: np.concatenate([getattr(part, one.name) for part in parts])
        for one in fields(Documents)
        if one.name != "files"
    }
    file = [part.file + shift for part, shift in zip(parts, shifts, strict=False)]
    columns["file"] = np.concatenate(file)
    return Documents([file for part in parts for file in part.files], **columns)
