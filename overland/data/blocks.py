"""Blocks one after another: each window's documents packed, and the blocks permuted.

A stream may begin with what another one has left over: when the length of sequences changes in the
middle of a window, the blocks of it that nobody has read yet are joined and cut again. No token is
given twice or left out, and no prediction inside a document is lost.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from overland.data.arrays import Arrays
from overland.data.order import group_alike, groups, permute
from overland.data.pack import Cut, LastBlock, Packing, Pieces, cut, num_packed
from overland.data.rows import Origins, Room
from overland.data.sources.marks import digest_of
from overland.data.windows import Documents, Reading, Windows

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
    """Blocks that are read together and are to be of similar length; 0: any."""


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

    def own_pieces(self, places: Array) -> Pieces:
        """Leaves out last tokens that come again elsewhere: over a window, every token once."""
        pieces = self.pieces(places)
        documents, which = self.documents, pieces.document
        borrowed = documents.borrowed[which] & (pieces.stop == documents.length[which])
        stop = pieces.stop - (self._shared(self.order[places], pieces) | borrowed)
        kept = stop > pieces.start
        return Pieces(pieces.row[kept], pieces.document[kept], pieces.start[kept], stop[kept])

    def joined(self, places: Array, packing: Packing) -> Documents:
        """The blocks at these places as documents: pieces that follow each other in a document are
        one again, and one that is followed by a block which is not among them keeps the token that
        both share, so that it is predicted."""
        blocks = np.sort(self.order[places])
        pieces = self.cut.pieces(blocks)
        order = np.lexsort((pieces.stop, pieces.start, pieces.document))
        document, start, stop = (
            values[order] for values in (pieces.document, pieces.start, pieces.stop)
        )
        shared = self._shared(blocks, pieces)[order]
        follows = (document[1:] == document[:-1]) & (start[1:] == stop[:-1] - 1)
        is_first, is_last = np.append(True, ~follows), np.append(~follows, True)
        document, start, stop = document[is_first], start[is_first], stop[is_last]
        whole = self.documents[document]
        borrowed = shared[is_last] | (whole.borrowed & (stop == whole.length))
        # By itself, the first token of a document that was read is predicted from nothing.
        kept = ~borrowed | (stop - start > 1) | (packing == "pack")
        return _parts(whole[kept], start[kept], stop[kept], borrowed[kept])

    def _shared(self, blocks: Array, pieces: Pieces) -> npt.NDArray[np.bool_]:
        """Whether a piece ends its block and its last token is the first of another."""
        is_last = np.append(pieces.row[1:] != pieces.row[:-1], True)
        shared: npt.NDArray[np.bool_] = is_last & self.cut.shares_last(blocks)[pieces.row]
        return shared


class BlockStream:
    """Blocks by number, without an end."""

    def __init__(
        self,
        windows: Windows,
        shape: Shape,
        reading: Reading,
        first: int = 0,
        rest: Rest | None = None,
    ) -> None:
        """Starts with window `first`, after the `rest` of another stream."""
        self.windows, self.shape, self.reading = windows, shape, reading
        self.first, self.rest = first, rest
        parts = [windows.key, shape.seq_len, shape.packing, shape.last_block, reading.seed]
        parts += [shape.alike] if shape.alike else []
        self.key = digest_of([*parts, first, rest.key if rest else None])
        self._opened: OrderedDict[int, Window] = OrderedDict()
        self._lead = 1 if rest else 0
        self._counts = reading.counts(
            f"blocks-{self.key}", self._count, windows.per_epoch + self._lead
        )

    def read(self, numbers: Array, rows: Array, into: Room) -> tuple[Array, Array]:
        """Fills `rows` of `into` with blocks; returns of every piece the row and where it begins in
        it."""
        piece_rows, piece_begins = [], []
        for window, mine, places in self._find(numbers):
            pieces, here = window.pieces(places), rows[mine]
            begins = _copy(window.documents, pieces, here, into, self.shape.pad_id)
            piece_rows.append(here[pieces.row])
            piece_begins.append(begins)
        return np.concatenate(piece_rows), np.concatenate(piece_begins)

    def read_samples(
        self, numbers: Array, rows: Array, arrays: Arrays, into: Mapping[str, npt.NDArray[Any]]
    ) -> tuple[Array, Array]:
        """Fills `rows` of `into` with samples; returns the number and the epoch of each."""
        sample, epoch = np.zeros((2, len(numbers)), np.int64)
        for window, mine, places in self._find(numbers):
            documents, which = window.documents, window.pieces(places).document
            sample[mine], epoch[mine] = documents.numbers(which)
            for i, file, start in zip(
                mine.tolist(),
                documents.file[which].tolist(),
                documents.start[which].tolist(),
                strict=True,
            ):
                record = documents.files[file].document(start)
                for name, values in arrays.decode(record, int(sample[i]), int(epoch[i])).items():
                    into[name][rows[i]] = values
        return sample, epoch

    def lengths(self, numbers: Array) -> Array:
        """The tokens of each block."""
        found = np.zeros(len(numbers), np.int64)
        for window, mine, places in self._find(numbers):
            found[mine] = window.lengths(places)
        return found

    def origins(self, numbers: Array, rows: Array) -> list[Origins]:
        return [
            _origins(window.documents, window.own_pieces(places), rows[mine])
            for window, mine, places in self._find(numbers)
        ]

    def places(self, numbers: npt.ArrayLike) -> tuple[Array, Array]:
        """The window that each block lies in, and its place there."""
        return self._counts.find(numbers)

    def num_blocks(self, windows: int) -> int:
        """Returns the number of blocks in the first so many windows."""
        return self._counts.total(windows)

    def num_blocks_in(self, epochs: float, enough: int = sys.maxsize) -> int:
        """Returns the number of blocks until so many epochs of the source are read, or `enough` if
        there are that many."""
        whole = int(epochs)
        count = self._counts.total_up_to(self.windows_before(whole), enough)
        if whole == epochs or count == enough:
            return count
        next_ = self._counts.total(self.windows_before(whole + 1))
        return min(count + math.ceil((epochs - whole) * (next_ - count)), enough)

    @property
    def num_counted(self) -> int:
        """Windows whose blocks are counted."""
        return self._counts.num_known

    def windows_before(self, epoch: int) -> int:
        """Windows of this stream that come before an epoch, from 0."""
        return max(0, epoch * self.windows.per_epoch - self.first + self._lead)

    def epochs_before(self, block: int) -> float | None:
        """How many epochs the blocks before this one are, where all of them are counted."""
        if block == 0 or self._counts.total(self.num_counted) < block:
            return None
        (window,), (place,) = self.places([block - 1])
        size = self._counts.total(window + 1) - self._counts.total(window)
        return float(self.window_behind(int(window)) + (place + 1) / size) / self.windows.per_epoch

    def open(self, window: int) -> Window:
        if window not in self._opened:
            rest = self.rest if window < self._lead else None
            shape = self.shape
            if rest:
                documents = rest.documents(shape.packing)
            else:
                documents = self.windows.open(self.window_behind(window))
            laid_out = cut(documents.length, shape.seq_len, shape.packing, shape.last_block)
            self._counts.check(window, laid_out.num_blocks)
            opened = Window(documents, laid_out, self._order(window, laid_out))
            self._opened[window] = self._with_alike(window, opened)
            while len(self._opened) > OPEN_WINDOWS:
                self._opened.popitem(last=False)
        self._opened.move_to_end(window)
        return self._opened[window]

    def window_behind(self, window: int) -> int:
        """Which window of documents a window of this stream is (none of them for the rest)."""
        return window - self._lead + self.first

    def _find(self, numbers: Array) -> Iterator[tuple[Window, Array, Array]]:
        """Yields each window, which of `numbers` lie in it, and at which places."""
        windows, places = self._counts.find(numbers)
        for window, mine in groups(windows):
            yield self.open(window), mine, places[mine]

    def _order(self, window: int, laid_out: Cut) -> Array:
        places = np.arange(laid_out.num_blocks)
        if not self.reading.shuffle or not len(places):
            return places
        return permute(places, len(places), "blocks", self.reading.seed, self.key, window)

    def _with_alike(self, window: int, opened: Window) -> Window:
        """Brings blocks of similar length together, if that is asked for."""
        size, order = self.shape.alike, opened.order
        if not size or not len(order):
            return opened
        lengths = opened.lengths(np.arange(len(order)))
        first = -self._counts.total(window) % size  # of a batch that began in the window before
        key = ("alike", self.reading.seed, self.key, window)
        return replace(opened, order=group_alike(order, lengths, first, size, key))

    def _count(self, first: int) -> npt.ArrayLike:
        if self.shape.packing == "pack" and first >= self._lead:
            tokens = self.windows.num_tokens(self.window_behind(first))
            if tokens is not None:
                return num_packed(tokens, self.shape.seq_len, self.shape.last_block)
        return [self.open(first).cut.num_blocks]


@dataclass(frozen=True)
class Rest:
    """The blocks of one window that were not read, from a place on."""

    stream: BlockStream
    window: int
    place: int
    rules: int
    """See `plan.Segment`."""

    @property
    def key(self) -> str:
        rules = [self.rules] if self.rules > 1 else []
        return digest_of([self.stream.key, self.window, self.place, *rules])

    def documents(self, packing: Packing) -> Documents:
        """The unread pieces as documents, which are to be packed like this."""
        window, places = self._unread()
        if self.stream.shape.packing == "trunc":  # what was not read yet need not stay cut
            return window.documents[window.pieces(places).document]
        if self.rules > 1:
            return window.joined(places, packing)
        pieces = window.own_pieces(places)
        whole = window.documents[pieces.document]
        return _parts(whole, pieces.start, pieces.stop, np.zeros(len(whole), bool))

    def num_lost(self) -> int:
        """Predictions inside documents that earlier rules gave up where blocks were cut again."""
        if self.rules > 1 or self.stream.shape.packing == "trunc":
            return 0
        window, places = self._unread()
        lengths = (self.documents("pack").length, window.joined(places, "pack").length)
        cut, joined = (int(np.maximum(one - 1, 0).sum()) for one in lengths)
        return joined - cut

    def _unread(self) -> tuple[Window, Array]:
        window = self.stream.open(self.window)
        return window, np.arange(self.place, window.cut.num_blocks)


def _parts(
    whole: Documents, start: Array, stop: Array, borrowed: npt.NDArray[np.bool_]
) -> Documents:
    """A part of each document, as a document of its own."""
    return Documents(
        whole.files,
        whole.file,
        whole.start + start,
        stop - start,
        whole.source,
        whole.number,
        whole.offset + start,
        borrowed,
        whole.epoch,
    )


def _copy(documents: Documents, pieces: Pieces, rows: Array, into: Room, pad_id: int) -> Array:
    """Writes the pieces into their rows, and padding behind them; returns where each begins."""
    sizes, which = pieces.stop - pieces.start, pieces.document
    ends = np.cumsum(sizes)
    first = np.searchsorted(pieces.row, np.arange(len(rows)))  # every row has a piece
    begins = ends - sizes - np.repeat((ends - sizes)[first], np.bincount(pieces.row))
    lengths = np.add.reduceat(sizes, first)
    into.num_tokens[rows] = lengths
    into.sample[rows], into.epoch[rows] = documents.numbers(which[first])

    width = into.tokens.shape[1]
    places = begins + rows[pieces.row] * width
    columns = (documents.file[which], documents.start[which] + pieces.start, places, sizes)
    spans = [column.tolist() for column in columns]
    short = np.flatnonzero(lengths < width)
    padded = list(zip(rows[short].tolist(), lengths[short].tolist(), strict=True))
    files = [shard.tokens for shard in documents.files]
    _fill(into.tokens, zip(*spans, strict=True), files, padded, pad_id)
    for name, channel in into.channels.items():
        given = {
            number: shard.channels[name]
            for number, shard in enumerate(documents.files)
            if name in shard.channels
        }
        there = (span for span in zip(*spans, strict=True) if span[0] in given)
        _fill(channel, there, given, padded, 0)
    return begins


def _fill(
    into: npt.NDArray[Any],
    spans: Iterable[tuple[int, ...]],
    files: Sequence[npt.NDArray[Any]] | Mapping[int, npt.NDArray[Any]],
    padded: Iterable[tuple[int, int]],
    padding: int,
) -> None:
    """Copies each span: the file, where it begins there and in `into`, and its size. Rows that are
    `padded` are so from a place on."""
    flat = into.reshape(-1)
    for file, first, place, size in spans:
        flat[place : place + size] = files[file][first : first + size]
    for row, end in padded:
        into[row, end:] = padding


def _origins(documents: Documents, pieces: Pieces, rows: Array) -> Origins:
    which = pieces.document
    return Origins(
        rows[pieces.row],
        documents.source[which],
        documents.number[which],
        documents.offset[which] + pieces.start,
        pieces.stop - pieces.start,
    )
