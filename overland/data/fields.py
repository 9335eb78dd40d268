"""What the model is given beside tokens: labels, and where borders count, positions, documents."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overland.data.blocks import Rows

Array = npt.NDArray[np.int64]
IGNORED = -100  # label that no loss is taken on


class Fields(NamedTuple):
    tokens: Array
    labels: Array
    positions: Array
    documents: Array
    """Number of the document in its row, from 0."""


def tokens_and_labels(rows: Rows) -> tuple[Array, Array]:
    """Rows without their last token, and without their first; no loss is taken on padding. Both
    are views of the same memory where that is possible: pinning it copies it anyway."""
    labels = rows.tokens[:, 1:]
    padded = _padded(rows).tolist()
    if padded:
        labels = labels.copy()
    for row in padded:
        labels[row, max(rows.num_tokens[row] - 1, 0) :] = IGNORED
    return rows.tokens[:, :-1], labels


def with_borders(rows: Rows) -> Fields:
    """No loss is taken across a border, and each document counts its positions from 0. Padding is
    a document of its own."""
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
    return Fields(
        tokens,
        labels,
        (np.arange(tokens.size) - np.repeat(begins, sizes)).reshape(tokens.shape),
        np.repeat(number, sizes).reshape(tokens.shape),
    )


def _padded(rows: Rows) -> Array:
    return np.flatnonzero(rows.num_tokens < rows.tokens.shape[1])
