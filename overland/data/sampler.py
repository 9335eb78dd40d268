"""The sampler: decides which rows of which source are in batch t, which of them a rank reads, where
the last epoch ends, and what is read next when a new segment begins.

A mixture of sequences has a lane of blocks per source, and rows are taken from the lanes in turn.
A mixture of documents has one lane, whose windows contain documents of all sources in turn. When a
new segment begins, each lane continues after the last block that was read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from overland.data.arrays import Arrays
from overland.data.blocks import BlockStream, Rest, Shape
from overland.data.corpus import Corpus
from overland.data.lanes import Gone, Lane, MadeRows, Rows, Samples
from overland.data.order import Mixture, groups
from overland.data.plan import LENGTH_STEP, Plan, Segment
from overland.data.windows import MixedWindows, Reading, SourceWindows
from overland.errors import DataError

Array = npt.NDArray[np.int64]
AnyCorpus: TypeAlias = Corpus | MadeRows
Corpora: TypeAlias = Mapping[str, AnyCorpus]


@dataclass(frozen=True)
class Lanes:
    """The lanes of a segment, how many blocks of each were read before it, and their mixture."""

    segment: Segment
    lanes: list[Lane]
    read_before: Array
    mixture: Mixture
    channels: Mapping[str, str]
    """The channels of the tokens, and their types."""

    def read_until(self, batch: int) -> Array:
        """Returns how many blocks of each lane are read before a batch of this segment."""
        rows = (batch - self.segment.first_batch) * self.segment.global_batch_size
        return self.read_before + self.mixture.before(rows)


class NoDocuments(DataError):
    """Raised when random tokens or images would be mixed by documents."""

    def __init__(self, what: str = "random tokens") -> None:
        super().__init__(f'{what} cannot be mixed by documents: set data.mixture = "sequences"')


def one_kind(corpora: Corpora) -> Arrays | None:
    """Returns the arrays that all sources have, or None if all have tokens."""
    kinds = {name: corpus.arrays for name, corpus in corpora.items()}
    first = next(iter(kinds), "")
    for name, kind in kinds.items():
        if kind != kinds[first]:
            what = (f"{one} has {kinds[one] or 'tokens'}" for one in (first, name))
            raise DataError(f"{', '.join(what)}: sources that are mixed must have the same fields")
    return kinds.get(first)


class Sampler:
    """Reads the rows of any batch of the plan."""

    def __init__(self, plan: Plan, corpora: Corpora, reading: Reading) -> None:
        self.plan, self.reading = plan, reading
        self.names = list(plan.sources)
        if plan.mixture == "documents":
            for name, one in corpora.items():
                if not isinstance(one, Corpus):
                    raise NoDocuments("random tokens" if one.arrays is None else name)
        self.corpora = corpora
        self.arrays = one_kind(corpora)
        self.windows = {
            name: SourceWindows(name, number, corpus, reading, plan.sources[name])
            for number, name in enumerate(self.names)
            if isinstance(corpus := corpora.get(name), Corpus)
        }
        self._lanes: list[Lanes] = []

    def read(self, batch: int, part: int = 0, num_parts: int = 1) -> Rows | Samples:
        """Reads a share of a batch's rows, of tokens or of arrays."""
        self._check_end(batch)
        lanes, whose, places = self.turns(batch, part, num_parts)
        into: Rows | Samples
        if self.arrays is None:
            into = Rows.empty(len(whose), self._width(lanes.segment, batch), lanes.channels)
        else:
            into = Samples.empty(len(whose), self.arrays)
        for number, mine in groups(whose):
            lanes.lanes[number].read(places[mine], mine, into)
        return into

    def num_batches(self, epochs: float = 1.0, drop: bool = False) -> int:
        """Counts the batches in this many epochs of the only source. The last one may be
        incomplete; `drop` leaves it out. Of random tokens, which never end, there is one."""
        segment = self.plan.segments[-1]
        size = segment.global_batch_size
        rows = self.rows_left(epochs, 0)
        if rows is None:
            return 1
        return segment.first_batch + (rows // size if drop else -(-rows // size))

    def rows_left(self, epochs: float = 1.0, at_most: int = 0) -> int | None:
        """Counts the rows of the last segment in this many epochs of the only source, up to
        `at_most`, if that is positive. Random tokens never end: None."""
        lanes = self.lanes(self.plan.segments[-1].first_batch)
        number, lane = self._only_lane(lanes)
        before = int(lanes.read_before[number])
        enough = before + at_most if at_most > 0 else sys.maxsize
        blocks = lane.num_blocks_in(epochs, enough)
        return None if blocks is None else max(0, blocks - before)

    def num_rows(self, batch: int) -> int:
        """Returns the number of rows of a batch before the end of its segment's epochs: all of
        them, except in the last batch. (If batches were skipped, further ones are read, and those
        are complete.)"""
        lanes = self.lanes(batch)
        segment, size = lanes.segment, lanes.segment.global_batch_size
        if segment.epochs is None:
            return size
        number, lane = self._only_lane(lanes)
        first = int(lanes.read_until(batch)[number])
        blocks = lane.num_blocks_in(segment.epochs, first + size)
        return size if blocks is None or blocks <= first else blocks - first

    def position(self, batch: int) -> tuple[int, int, int] | None:
        """Returns the epoch that a batch begins in, its place there, and the size of an epoch, or
        None if that cannot be computed, as for text."""
        lane, read = self._read_of_one(batch, batch)
        size = lane.epoch_size if lane is not None else None
        return None if size is None else (*divmod(read, size), size)

    def epoch(self, batch: int) -> float | None:
        """Returns how many epochs of the only source were read before this batch, or None for
        several sources. Everything before the batch must have been read: this counts nothing,
        because another thread may be reading."""
        if batch == 0:
            return 0.0
        lane, read = self._read_of_one(batch - 1, until=batch)
        return None if lane is None else lane.epochs_before(read)

    def _read_of_one(self, batch: int, until: int) -> tuple[Lane | None, int]:
        """Returns the only lane that a batch is read from, if there is only one, and how many
        blocks of it are read before batch `until`, which may be the first of another segment."""
        lanes = self.lanes(batch)
        used = np.flatnonzero(lanes.mixture.shares).tolist()
        read = int(lanes.read_until(until)[used[0]])
        return lanes.lanes[used[0]] if len(used) == 1 else None, read

    def _width(self, segment: Segment, batch: int) -> int:
        """Returns the tokens per row of a batch, including the one that is only predicted. If rows
        are grouped by length, this is the longest row of all ranks, rounded up."""
        if not segment.group_by_length:
            return segment.seq_len + 1
        lanes, whose, places = self.turns(batch, 0, 1)
        longest = max(
            int(lanes.lanes[number].lengths(places[mine]).max()) for number, mine in groups(whose)
        )
        given = -(-max(longest - 1, 1) // LENGTH_STEP) * LENGTH_STEP
        return min(given, segment.seq_len) + 1

    def _only_lane(self, lanes: Lanes) -> tuple[int, Lane]:
        """Returns the only lane that a segment reads from, and its number."""
        (number,) = np.flatnonzero(lanes.mixture.shares).tolist()
        return number, lanes.lanes[number]

    def _read_after(self, lanes: Lanes, batch: int) -> Array:
        """Returns how many blocks of each lane have been read after a batch, without masked
        rows."""
        read = lanes.read_until(batch + 1)
        if lanes.segment.epochs is not None:
            read[self._only_lane(lanes)[0]] -= lanes.segment.global_batch_size - self.num_rows(
                batch
            )
        return read

    def _check_end(self, batch: int) -> None:
        """Raises an error on every rank if a source ends inside a batch, not only on the rank that
        reads its end."""
        if all(source.max_epochs is None for source in self.plan.sources.values()):
            return
        lanes = self.lanes(batch)
        after = self._read_after(lanes, batch)
        for lane, before, last in zip(lanes.lanes, lanes.read_until(batch), after, strict=True):
            if last > before:
                lane.require(last - 1)

    def turns(self, batch: int, part: int, num_parts: int) -> tuple[Lanes, Array, Array]:
        """Returns the lanes of a batch and, of each row of a share of it, which lane it is from and
        the number of its block there."""
        lanes = self.lanes(batch)
        segment = lanes.segment
        share, rest = divmod(segment.global_batch_size, num_parts)
        assert not rest, f"{segment.global_batch_size} rows are not shared evenly by {num_parts}"
        first = (batch - segment.first_batch) * segment.global_batch_size + part * share
        turns = np.arange(first, first + share)
        whose = lanes.mixture.whose(turns)
        places = lanes.read_before[whose] + lanes.mixture.places(turns)
        if segment.epochs is not None:  # an incomplete batch is filled with copies of its last row
            places = np.minimum(places, self._read_after(lanes, batch)[whose] - 1)
        return lanes, whose, places

    def lanes(self, batch: int) -> Lanes:
        """Returns the lanes of the segment that contains this batch."""
        number = self.plan.segments.index(self.plan.segment(batch))
        while len(self._lanes) <= number:
            segment = self.plan.segments[len(self._lanes)]
            self._lanes.append(self._next(segment) if self._lanes else self._first(segment))
        return self._lanes[number]

    def _first(self, segment: Segment) -> Lanes:
        lanes: list[Lane]
        if self.plan.mixture == "documents":
            lanes = [self._mixed(segment, [0] * len(self.names))]
        else:
            lanes = [self._lane(name, segment) for name in self.names]
        return self._lanes_of(segment, lanes, np.zeros(len(lanes), np.int64))

    def _next(self, segment: Segment) -> Lanes:
        before = self._lanes[-1]
        read = self._read_after(before, segment.first_batch - 1)
        lanes: list[Lane] = []
        same_shape = self._shape(segment) == self._shape(before.segment)
        same_weights = segment.weights == before.segment.weights
        is_kept = same_shape and (self.plan.mixture == "sequences" or same_weights)
        for number, old in enumerate(before.lanes):
            if is_kept or not isinstance(old, BlockStream):
                lanes.append(old.in_segment(segment))
            else:
                lanes.append(self._after(old, int(read[number]), segment))
                read[number] = 0
        return self._lanes_of(segment, lanes, read)

    def _lanes_of(self, segment: Segment, lanes: list[Lane], read_before: Array) -> Lanes:
        mixture = Mixture([1] if self.plan.mixture == "documents" else self._weights(segment))
        return Lanes(segment, lanes, read_before, mixture, self._channels(segment))

    def _after(self, old: BlockStream, read: int, segment: Segment) -> BlockStream:
        """Returns a lane that continues after the first `read` blocks of another."""
        rest, first = old.after(read)
        if isinstance(old.windows, MixedWindows):
            return self._mixed(segment, old.windows.taken(first), rest)
        shape = self._shape(segment, old.windows.name)
        return BlockStream(old.windows, shape, self.reading, first, rest)

    def _lane(self, name: str, segment: Segment) -> Lane:
        if name in self.windows:
            return BlockStream(self.windows[name], self._shape(segment, name), self.reading)
        made, number = self.corpora.get(name), self.names.index(name)
        if not isinstance(made, MadeRows):
            return Gone(name)
        epochs = self.plan.sources[name].max_epochs
        return made.as_lane(name, number, self.reading, epochs).in_segment(segment)

    def _mixed(self, segment: Segment, starts: list[int], rest: Rest | None = None) -> BlockStream:
        mixture = Mixture(self._weights(segment))
        sources = [self.windows[name] for name in self.names]
        windows = MixedWindows(sources, mixture, self.reading, starts)
        return BlockStream(windows, self._shape(segment), self.reading, rest=rest)

    def _channels(self, segment: Segment) -> dict[str, str]:
        """Returns the channels of a segment: those of all sources that it reads."""
        read = (name for name, weight in segment.weights.items() if weight and name in self.corpora)
        types: dict[str, list[str]] = {}
        for source in read:
            for name, dtype in self.corpora[source].channels.items():
                types.setdefault(name, []).append(dtype)
        # A type that can represent the values of all sources: an 8-bit integer cannot hold 0.5.
        return {name: np.result_type(*found).str for name, found in types.items()}

    def _weights(self, segment: Segment) -> list[float]:
        return [segment.weights.get(name, 0) for name in self.names]

    def _shape(self, segment: Segment, name: str | None = None) -> Shape:
        """Returns how the documents of one source, or of all, become blocks."""
        alike = segment.global_batch_size if segment.group_by_length else 0
        if alike and name is not None:  # a source's share of a batch
            weights = segment.weights
            alike = max(1, round(alike * weights.get(name, 0) / sum(weights.values())))
        return Shape(segment.seq_len, segment.packing, segment.last_block, segment.pad_id, alike)
