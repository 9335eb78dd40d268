"""Rows of a batch, as they are read: tokens or samples of arrays, in NumPy.

Rows of tokens have labels and, with document boundaries, positions and document numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from overland.data.shard import ANSWERS, CHOSEN, REJECTED, WEIGHTS

Array = npt.NDArray[np.int64]
IGNORED = -100  # label without a loss


@dataclass(frozen=True)
class Rows:
    """Blocks as rows of `seq_len + 1` tokens."""

    tokens: Array
    num_tokens: Array
    """The number of real tokens in each row; the rest is padding."""
    piece_row: Array
    piece_begin: Array
    """Where each piece of a document begins: the row, and the place in it."""
    sample: Array
    """The document that each row begins with: source × 2⁵⁶ + its number there."""
    epoch: Array
    """How many times that document was read before."""
    channels: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Channels with an element per token, by name; 0 for padding."""


@dataclass(frozen=True)
class Samples:
    """Arrays by name, with a row for each sample; see `Rows` for the numbers."""

    arrays: Mapping[str, npt.NDArray[Any]]
    sample: Array
    epoch: Array


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
    width = rows.tokens.shape[1]
    padded = _padded(rows)
    begins = np.append(rows.piece_begin, rows.num_tokens[padded])
    begins = np.sort(begins + width * np.append(rows.piece_row, padded))
    row, begin = np.divmod(begins, width)
    labels[row[begin > 0], begin[begin > 0] - 1] = IGNORED
    row, begin = row[begin < width - 1], begin[begin < width - 1]
    begins = row * (width - 1) + begin
    sizes = np.diff(begins, append=tokens.size)
    number = np.arange(len(row)) - np.searchsorted(row, row)
    return RowFields(
        tokens,
        labels,
        (np.arange(tokens.size) - np.repeat(begins, sizes)).reshape(tokens.shape),
        np.repeat(number, sizes).reshape(tokens.shape),
    )


def answers_apart(rows: Rows) -> Rows:
    """Returns rows of pairs in which the second answer begins a document of its own."""
    answers = rows.channels[ANSWERS]
    row, place = np.nonzero((answers[:, :-1] == CHOSEN) & (answers[:, 1:] == REJECTED))
    return replace(
        rows,
        piece_row=np.append(rows.piece_row, row),
        piece_begin=np.append(rows.piece_begin, place + 1),
    )


@dataclass(frozen=True)
class Room:
    """Buffers for rows of tokens, which several streams fill; see `Rows`."""

    tokens: Array
    num_tokens: Array
    sample: Array
    epoch: Array
    channels: Mapping[str, npt.NDArray[Any]]

    @classmethod
    def of(cls, rows: int, width: int, channels: Mapping[str, str]) -> Room:
        """Allocates this many rows. A document without weights has weight 1; other channels are 0
        for sources that lack them."""
        shape = (rows, width)
        num_tokens, sample, epoch = np.empty((3, rows), np.int64)
        filled = {name: np.full(shape, name == WEIGHTS, dtype) for name, dtype in channels.items()}
        return cls(np.empty(shape, np.int64), num_tokens, sample, epoch, filled)


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


def _padded(rows: Rows) -> Array:
    return np.flatnonzero(rows.num_tokens < rows.tokens.shape[1])
