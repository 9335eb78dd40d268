"""Rows, their labels and positions, without loss on padding and across documents; and lanes, the
endless sequences of numbered rows that a sampler reads, here of images.

Documents that are packed into blocks are in blocks.py. Here are images, which are read one by one
from their files, or generated, without shards. Image i of a stream is a function of the set, the
seed and i alone: its epoch is i // n, and a keyed permutation for that epoch determines which of
the n images it is. The order therefore does not depend on the number of ranks or on restarts.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from overland.data.arrays import Arrays
from overland.data.order import groups, permute
from overland.data.plan import Segment
from overland.data.shard import WEIGHTS
from overland.data.sources.image_files import ArrayList
from overland.data.windows import Exhausted, Reading
from overland.errors import DataError

Array = npt.NDArray[np.int64]
IGNORED = -100  # label without a loss
READERS = max(2, min(8, os.cpu_count() or 2))  # threads, which wait for the disk or copy


@dataclass(frozen=True)
class Rows:
    """Blocks as rows of `seq_len + 1` tokens, which several lanes fill."""

    tokens: Array
    num_tokens: Array
    """The number of real tokens in each row; the rest is padding."""
    begins: npt.NDArray[np.bool_]
    """Whether a piece of a document begins with this token."""
    sample: Array
    """The document that each row begins with: source × 2⁵⁶ + its number there."""
    epoch: Array
    """How many times that document was read before."""
    channels: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Channels with an element per token, by name; 0 for padding."""

    @classmethod
    def empty(cls, rows: int, width: int, channels: Mapping[str, str]) -> Rows:
        """Allocates this many rows. A document without weights has weight 1; other channels are 0
        for sources that lack them."""
        shape = (rows, width)
        num_tokens, sample, epoch = np.empty((3, rows), np.int64)
        filled = {name: np.full(shape, name == WEIGHTS, dtype) for name, dtype in channels.items()}
        tokens, begins = np.empty(shape, np.int64), np.zeros(shape, bool)
        return cls(tokens, num_tokens, begins, sample, epoch, filled)


class RowFields(NamedTuple):
    tokens: Array
    labels: Array
    positions: Array
    documents: Array
    """The number of the document in its row, from 0."""


def tokens_and_labels(rows: Rows) -> tuple[Array, Array]:
    """Returns the rows without their last token, and without their first; padding has no loss.
    Both are views of the same memory if possible, since pinning copies it anyway."""
    labels = rows.tokens[:, 1:]
    padded = _padded(rows).tolist()
    if padded:
        labels = labels.copy()
    for row in padded:
        labels[row, max(rows.num_tokens[row] - 1, 0) :] = IGNORED
    return rows.tokens[:, :-1], labels


def with_borders(rows: Rows) -> RowFields:
    """Adds document boundaries: no loss across them, and positions that start at 0 in each
    document. Padding is a document of its own."""
    tokens, labels = tokens_and_labels(rows)
    labels = labels if labels.base is None else labels.copy()
    padded, begins = _padded(rows), rows.begins.copy()
    begins[padded, rows.num_tokens[padded]] = True
    labels[begins[:, 1:]] = IGNORED
    begins = begins[:, :-1]
    first = np.flatnonzero(begins)
    sizes = np.diff(first, append=begins.size)
    row = first // begins.shape[1]
    number = np.arange(len(row)) - np.searchsorted(row, row)
    return RowFields(
        tokens,
        labels,
        (np.arange(begins.size) - np.repeat(first, sizes)).reshape(begins.shape),
        np.repeat(number, sizes).reshape(begins.shape),
    )


def _padded(rows: Rows) -> Array:
    return np.flatnonzero(rows.num_tokens < rows.tokens.shape[1])


@dataclass(frozen=True)
class Samples:
    """Samples of arrays, which several lanes fill; see `Rows` for the numbers."""

    declared: Arrays
    arrays: Mapping[str, npt.NDArray[Any]]
    """A row for each sample, by name."""
    sample: Array
    epoch: Array

    @classmethod
    def empty(cls, rows: int, declared: Arrays) -> Samples:
        return cls(declared, declared.empty(rows), *np.zeros((2, rows), np.int64))


class Lane:
    """An endless sequence of numbered blocks or samples, of which a sampler reads those that are
    due."""

    epoch_size: int | None = None
    """The number of blocks in an epoch, if that is the same for all and known in advance."""

    def read(self, numbers: Array, rows: Array, into: Rows | Samples) -> None:
        """Fills `rows` of `into` with blocks or samples."""
        raise NotImplementedError

    def lengths(self, numbers: Array) -> Array:
        """Returns the number of tokens in each block."""
        raise NotImplementedError

    def require(self, number: int) -> None:
        """Raises an error if the source ends before this block."""

    def num_blocks_in(self, epochs: float, enough: int = sys.maxsize) -> int | None:
        """Returns the number of blocks in this many epochs of the source, but at most `enough`;
        None if it never ends."""
        return None

    def epochs_before(self, block: int) -> float | None:
        """Returns how many epochs the blocks before this one make up, if that is known."""
        return None

    def in_segment(self, segment: Segment) -> Lane:
        """Returns the lane as another segment reads it."""
        return self


class Gone(Lane):
    """The lane of a source of an earlier segment that is no longer available."""

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, *_: Any) -> Any:
        raise DataError(f"the data source {self.name} is no longer in the config: add it again")

    lengths: Any = read


class MadeRows:
    """Data without a corpus of documents: rows that are made, or images that are read one by
    one."""

    fingerprint: str
    arrays: Arrays | None = None
    channels: Mapping[str, str] = {}
    num_bad = 0
    counts: Mapping[str, int] = {}
    is_complete = True
    eos_id: int | None = None

    def as_lane(self, name: str, source: int, reading: Reading, max_epochs: int | None) -> Lane:
        """Returns its rows; `name` and number are those of the plan."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is open."""


class ImageSet(MadeRows):
    """Images, numbered from 0."""

    arrays: Arrays
    count: int
    shape: tuple[int, int, int]
    """Of those that are generated, before they are padded."""

    def __len__(self) -> int:
        return self.count

    def fill(self, number: int, into: npt.NDArray[Any]) -> None:
        """Reads an image into an array of the declared type and shape."""
        raise NotImplementedError

    def as_lane(self, name: str, source: int, reading: Reading, max_epochs: int | None) -> Lane:
        return ImageStream(name, source, self, reading, max_epochs)


class ListedImages(ImageSet):
    """The images of a list of files."""

    def __init__(self, name: str, source: ArrayList) -> None:
        self.source, self.count, self.num_bad = source, len(source), source.num_bad
        self.arrays = Arrays.declared(name, source.fields)
        self.fingerprint = f"images-{source.digest()}"

    def fill(self, number: int, into: npt.NDArray[Any]) -> None:
        self.source.fill(number, into)


@dataclass(frozen=True)
class ImageStream(Lane):
    """The images of a set, epoch after epoch, each in its own order."""

    name: str
    source: int
    """Its number in the plan."""
    images: ImageSet
    reading: Reading
    max_epochs: int | None = None

    def read(self, numbers: Array, rows: Array, into: Rows | Samples) -> None:
        assert isinstance(into, Samples)
        which, into.epoch[rows] = self.places(numbers)
        into.sample[rows] = (self.source << 56) + which
        (values,) = into.arrays.values()
        jobs = [
            _readers(os.getpid()).submit(self.images.fill, number, values[row])
            for number, row in zip(which.tolist(), rows.tolist(), strict=True)
        ]
        for job in jobs:
            job.result()

    def places(self, numbers: npt.ArrayLike) -> tuple[Array, Array]:
        """Returns the number in the set of each image of the stream, and its epoch."""
        size = len(self.images)
        epoch, place = np.divmod(np.asarray(numbers, np.int64), size)
        if self.max_epochs is not None and epoch.size and epoch.max() >= self.max_epochs:
            raise Exhausted(self.name, self.max_epochs)
        if self.reading.shuffle:
            for one, now in groups(epoch):
                place[now] = permute(place[now], size, "images", self.reading.seed, self.name, one)
        return place, epoch

    @property
    def epoch_size(self) -> int:  # type: ignore[override]
        return len(self.images)

    def require(self, number: int) -> None:
        self.places([number])

    def epochs_before(self, block: int) -> float:
        return block / len(self.images)

    def num_blocks_in(self, epochs: float, enough: int = sys.maxsize) -> int:
        return min(math.ceil(epochs * len(self.images)), enough)


@cache
def _readers(process: int) -> ThreadPoolExecutor:
    """Returns the thread pool of a process; a forked process does not have its parent's threads."""
    return ThreadPoolExecutor(READERS, "image-reader")
