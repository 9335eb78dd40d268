"""A stream of blocks: packs the documents of each window, shuffles the blocks or groups them by
length, and cuts the unread ones again when the sequence length changes.

A stream may begin with what is left of another one: when the sequence length changes in the middle
of a window, the blocks that were not read yet are joined and cut again. No token is repeated or
left out, and no prediction inside a document is lost.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from overland.data.lanes import Lane, Rows, Samples
from overland.data.order import group_alike, groups, permute
from overland.data.pack import Cut, LastBlock, Packing, Pieces, cut, num_packed
from overland.data.plan import REST_RULES
from overland.data.shard import TOKENS, Shard
from overland.data.sources.file_marks import digest_of
from overland.data.windows import Documents, MixedWindows, Reading, SourceWindows

Array = npt.NDArray[np.int64]
OPEN_WINDOWS = 3


@dataclass(frozen=True)
class Shape:
    """How documents become blocks."""

    seq_len: int
    packing: Packing = "pack"
    last_block: LastBlock = "pad"
    pad_id: int = 0
    alike: int = 0
    """How many consecutive blocks should have similar lengths; 0: lengths do not matter."""


@dataclass(frozen=True)
class Window:
    documents: Documents
    cut: Cut
    order: Array
    """The block at each place."""

    def pieces(self, places: Array) -> Pieces:
        return self.cut.pieces(self.order[places])

    def lengths(self, places: Array) -> Array:
        pieces = self.pieces(places)
        sizes = np.bincount(pieces.row, pieces.stop - pieces.start, minlength=len(places))
        return sizes.astype(np.int64)

    def joined(self, places: Array, packing: Packing) -> Documents:
        """Returns the blocks at these places as documents: adjacent pieces of a document are joined
        again. A piece whose next block is not among them keeps the token that both share, so that
        it is predicted."""
        blocks = np.sort(self.order[places])
        pieces = self.cut.pieces(blocks)
        order = np.lexsort((pieces.stop, pieces.start, pieces.document))
        document, start, stop = (
            values[order] for values in (pieces.document, pieces.start, pieces.stop)
        )
        shared = self.shared(blocks, pieces)[order]
        follows = (document[1:] == document[:-1]) & (start[1:] == stop[:-1] - 1)
        is_first, is_last = np.append(True, ~follows), np.append(~follows, True)
        document, start, stop = document[is_first], start[is_first], stop[is_last]
        whole = self.documents[document]
        borrowed = shared[is_last] | (whole.borrowed & (stop == whole.length))
        # A borrowed token on its own is the first of its document, with nothing to predict it from.
        kept = ~borrowed | (stop - start > 1) | (packing == "pack")
        whole, start, stop = whole[kept], start[kept], stop[kept]
        return replace(
            whole,
            start=whole.start + start,
            length=stop - start,
            offset=whole.offset + start,
            borrowed=borrowed[kept],
        )

    def shared(self, blocks: Array, pieces: Pieces) -> npt.NDArray[np.bool_]:
        """Whether a piece ends its block with a token that is also the first of another block."""
        is_last = np.append(pieces.row[1:] != pieces.row[:-1], True)
        shared: npt.NDArray[np.bool_] = is_last & self.cut.shares_last(blocks)[pieces.row]
        return shared


class BlockStream(Lane):
    """The documents of windows, packed into blocks."""

    def __init__(
        self,
        windows: SourceWindows | MixedWindows,
        shape: Shape,
        reading: Reading,
        first: int = 0,
        rest: Rest | None = None,
    ) -> None:
        """Starts with the `rest` of another stream, if any, and continues with window `first`."""
        self.windows, self.shape, self.reading = windows, shape, reading
        self.first, self.rest = first, rest
        parts = [windows.key, shape.seq_len, shape.packing, shape.last_block, reading.seed]
        parts += [shape.alike] if shape.alike else []
        self.key = digest_of([*parts, first, rest.key if rest else None])
        self.open = lru_cache(OPEN_WINDOWS)(self._open)
        self._lead = 1 if rest else 0
        self._counts = reading.counts(f"blocks-{self.key}", windows.per_epoch + self._lead)

    def read(self, numbers: Array, rows: Array, into: Rows | Samples) -> None:
        for window, mine, places in self.find(numbers):
            pieces = window.pieces(places)
            if isinstance(into, Rows):
                _copy(window.documents, pieces, rows[mine], into, self.shape.pad_id)
            else:
                _copy_samples(window.documents, pieces.document, rows[mine], into)

    def lengths(self, numbers: Array) -> Array:
        found = np.zeros(len(numbers), np.int64)
        for window, mine, places in self.find(numbers):
            found[mine] = window.lengths(places)
        return found

    def places(self, numbers: npt.ArrayLike) -> tuple[Array, Array]:
        """Returns the window that contains each block, and its place there."""
        while (found := self._counts.find(numbers)) is None:
            self._count_next()
        return found

    def require(self, number: int) -> None:
        self.places([number])

    def num_blocks(self, windows: int, enough: int = sys.maxsize) -> int:
        """Returns the number of blocks in the first `windows` windows, but at most `enough`."""
        while self.num_counted < windows and self._counts.total(self.num_counted) < enough:
            self._count_next()
        return min(self._counts.total(windows), enough)

    def num_blocks_in(self, epochs: float, enough: int = sys.maxsize) -> int:
        whole = int(epochs)
        count = self.num_blocks(self.windows_before(whole), enough)
        if whole == epochs or count == enough:
            return count
        next_ = self.num_blocks(self.windows_before(whole + 1))
        return min(count + math.ceil((epochs - whole) * (next_ - count)), enough)

    @property
    def num_counted(self) -> int:
        """The number of windows whose blocks are counted."""
        return self._counts.num_known

    def windows_before(self, epoch: int) -> int:
        """Returns the number of windows of this stream before an epoch (counted from 0)."""
        return max(0, epoch * self.windows.per_epoch - self.first + self._lead)

    def epochs_before(self, block: int) -> float | None:
        """Returns None unless all blocks are counted, and of one source."""
        if block == 0 or self.windows.name is None or self._counts.total(self.num_counted) < block:
            return None
        (window,), (place,) = self.places([block - 1])
        size = self._counts.total(window + 1) - self._counts.total(window)
        return float(self.window_behind(int(window)) + (place + 1) / size) / self.windows.per_epoch

    def after(self, read: int) -> tuple[Rest | None, int]:
        """Returns what the first `read` blocks leave of their last window, and the window of
        documents that follows."""
        if read == 0:
            return self.rest, self.first
        window, place = (int(one[0]) for one in self.places([read]))
        first = self.window_behind(window)
        if place or first < self.first:
            return Rest(self, window, place), first + 1
        return None, first

    def _open(self, window: int) -> Window:
        shape = self.shape
        if self.rest and window < self._lead:
            documents = self.rest.documents(shape.packing)
        else:
            documents = self.windows.open(self.window_behind(window))
        laid_out = cut(documents.length, shape.seq_len, shape.packing, shape.last_block)
        self._counts.check(window, laid_out.num_blocks)
        order = np.arange(laid_out.num_blocks)
        if self.reading.shuffle and len(order):
            order = permute(order, len(order), "blocks", self.reading.seed, self.key, window)
        return self._with_alike(window, Window(documents, laid_out, order))

    def window_behind(self, window: int) -> int:
        """Returns the window of documents behind a window of this stream (which the rest lacks)."""
        return window - self._lead + self.first

    def find(self, numbers: Array) -> Iterator[tuple[Window, Array, Array]]:
        """Yields each window, the indices of the `numbers` in it, and their places there."""
        windows, places = self.places(numbers)
        for window, mine in groups(windows):
            yield self.open(window), mine, places[mine]

    def _with_alike(self, window: int, opened: Window) -> Window:
        """Groups blocks of similar length, if requested."""
        size, order = self.shape.alike, opened.order
        if not size or not len(order):
            return opened
        lengths = opened.lengths(np.arange(len(order)))
        first = -self.num_blocks(window) % size  # left of a group from the window before
        key = ("alike", self.reading.seed, self.key, window)
        return replace(opened, order=group_alike(order, lengths, first, size, key))

    def _count_next(self) -> None:
        """Counts the next windows: one, or as many as is cheap."""
        first, tokens = self.num_counted, None
        if self.shape.packing == "pack" and first >= self._lead:
            tokens = self.windows.num_tokens(self.window_behind(first))
        if tokens is not None:
            self._counts.add(num_packed(tokens, self.shape.seq_len, self.shape.last_block))
        else:
            self._counts.add([self.open(first).cut.num_blocks])


@dataclass(frozen=True)
class Rest:
    """The unread blocks of a window, from `place` on."""

    stream: BlockStream
    window: int
    place: int

    @property
    def key(self) -> str:
        return digest_of([self.stream.key, self.window, self.place, REST_RULES])

    def documents(self, packing: Packing) -> Documents:
        """Returns the unread pieces as documents, to be packed in this way."""
        window = self.stream.open(self.window)
        places = np.arange(self.place, window.cut.num_blocks)
        if self.stream.shape.packing == "trunc":  # unread documents need not stay truncated
            return window.documents[window.pieces(places).document]
        return window.joined(places, packing)


def _copy(documents: Documents, pieces: Pieces, rows: Array, into: Rows, pad_id: int) -> None:
    """Copies the pieces into their rows, followed by padding."""
    sizes, which = pieces.stop - pieces.start, pieces.document
    ends = np.cumsum(sizes)
    first = np.searchsorted(pieces.row, np.arange(len(rows)))  # every row has a piece
    begins = ends - sizes - np.repeat((ends - sizes)[first], np.bincount(pieces.row))
    lengths = np.add.reduceat(sizes, first)
    into.num_tokens[rows] = lengths
    into.sample[rows], into.epoch[rows] = documents.numbers(which[first])

    width = into.tokens.shape[1]
    places = begins + rows[pieces.row] * width
    into.begins.reshape(-1)[places] = True
    columns = (documents.file[which], documents.start[which] + pieces.start, places, sizes)
    spans = [column.tolist() for column in columns]
    short = np.flatnonzero(lengths < width)
    padded = list(zip(rows[short].tolist(), lengths[short].tolist(), strict=True))
    _fill(into.tokens, TOKENS, zip(*spans, strict=True), documents.files, padded, pad_id)
    for name, channel in into.channels.items():
        have = [name in shard.channels for shard in documents.files]
        there = (span for span in zip(*spans, strict=True) if have[span[0]])
        _fill(channel, name, there, documents.files, padded, 0)


def _copy_samples(documents: Documents, which: Array, rows: Array, into: Samples) -> None:
    into.sample[rows], into.epoch[rows] = documents.numbers(which)
    columns = (rows, documents.file[which], documents.start[which])
    for row, file, start in zip(*(column.tolist() for column in columns), strict=True):
        record = documents.files[file].document(start)
        for name, values in into.declared.decode(record).items():
            into.arrays[name][row] = values


def _fill(
    into: npt.NDArray[Any],
    channel: str,
    spans: Iterable[tuple[int, ...]],
    files: Sequence[Shard],
    padded: Iterable[tuple[int, int]],
    padding: int,
) -> None:
    """Copies each span: the file, its offsets there and in `into`, and its size. `padded` lists
    rows with the place where their padding begins."""
    flat = into.reshape(-1)
    for file, first, place, size in spans:
        flat[place : place + size] = files[file].read(first, first + size, channel)
    for row, end in padded:
        into[row, end:] = padding
