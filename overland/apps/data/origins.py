"""Where the tokens of a batch come from, document by document: for `overland data preview` and
`overland prove data`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from overland.apps.data.made_rows import RandomBlocks
from overland.data.blocks import Array, BlockStream, Window
from overland.data.lanes import ImageStream, Lane
from overland.data.order import groups
from overland.data.pack import Pieces
from overland.data.sampler import Sampler


@dataclass(frozen=True)
class Origins:
    """The origins of rows, piece by piece. Each token counts where the model reads it, so the last
    token of a row, which is only predicted, counts there only if no other row repeats it."""

    row: Array
    source: Array
    number: Array
    """The number of the document in its source."""
    start: Array
    """Where in its document a piece begins."""
    length: Array


def origins_of(rows: Sampler, batch: int, part: int = 0, num_parts: int = 1) -> list[Origins]:
    """Returns the origins of a share of a batch's rows, in pieces, without masked rows."""
    lanes, whose, places = rows.turns(batch, part, num_parts)
    counted = max(0, rows.num_rows(batch) - part * len(whose))
    return [
        origins
        for number, mine in groups(whose[:counted])
        for origins in _in_lane(lanes.lanes[number], places[mine], mine)
    ]


def _in_lane(lane: Lane, numbers: Array, rows: Array) -> Iterator[Origins]:
    if isinstance(lane, BlockStream):
        for window, mine, places in lane.find(numbers):
            documents, pieces = window.documents, _own_pieces(window, places)
            which, length = pieces.document, pieces.stop - pieces.start
            start = documents.offset[which] + pieces.start
            source, number = documents.source[which], documents.number[which]
            yield Origins(rows[mine][pieces.row], source, number, start, length)
        return
    none = np.zeros_like(rows)
    if isinstance(lane, ImageStream):
        which, _ = lane.places(numbers)
        yield Origins(rows, none + lane.source, which, none, none + 1)
    else:  # the source of any other lane is still there, or its rows could not be read
        assert isinstance(lane, RandomBlocks)
        yield Origins(rows, none + lane.source, numbers, none, none + lane.seq_len + 1)


def _own_pieces(window: Window, places: Array) -> Pieces:
    """Returns the pieces without last tokens that another block repeats, so that over a window
    every token occurs once."""
    pieces = window.pieces(places)
    documents, which = window.documents, pieces.document
    borrowed = documents.borrowed[which] & (pieces.stop == documents.length[which])
    stop = pieces.stop - (window.shared(window.order[places], pieces) | borrowed)
    kept = stop > pieces.start
    return Pieces(pieces.row[kept], pieces.document[kept], pieces.start[kept], stop[kept])
