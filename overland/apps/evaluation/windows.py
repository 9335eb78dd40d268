"""Windows over token ids: what the model reads, and which of its predictions count.

A text of n tokens has n - 1 predictions: of each token after the first, from those before it. A
model sees `context` tokens at a time, so a longer text is split into windows that start every
`stride` tokens. A window only counts tokens that no earlier window has predicted:

    context 4, stride 2     0 1 2 3 | 4 5 6 7 8       tokens
                            1 2 3 4                   the first window predicts four
                                2 3 [4] 5 6           the second counts the last two
                                      4 5 [6] 7 8     and so on: every token exactly once
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overland.data.batch import IGNORED

Ids = npt.NDArray[np.int64]
Span = tuple[int, int, int]
"""Start and end of a window, and the first prediction in it that counts."""


@dataclass(frozen=True)
class WindowRow:
    """A window: the input tokens, and the label of each (-100: not counted)."""

    tokens: Ids
    labels: Ids

    @property
    def num_scored(self) -> int:
        return int((self.labels != IGNORED).sum())


def spans(num_tokens: int, context: int, stride: int) -> Iterator[Span]:
    """Yields the windows of a text with this many tokens."""
    start = counted = 0
    while counted < num_tokens - 1:
        stop = min(start + context, num_tokens - 1)
        yield start, stop, counted
        start, counted = start + stride, stop


def row_of(ids: Ids, span: Span, counts: npt.NDArray[np.bool_] | None = None) -> WindowRow:
    """Returns a window of a text. `counts`: which of its tokens are scored at all."""
    start, stop, first = span
    labels = ids[start + 1 : stop + 1].copy()
    labels[: first - start] = IGNORED
    if counts is not None:
        labels[~counts[start + 1 : stop + 1]] = IGNORED
    return WindowRow(ids[start:stop], labels)


def batches(
    rows: Sequence[WindowRow], most_tokens: int, alike_from: int | None = None
) -> Iterator[list[int]]:
    """Yields the numbers of rows that form a batch: rows of similar length, longest first, with at
    most `most_tokens` including padding (or a single row). Rows longer than `alike_from` are only
    batched with rows of the same length, since padding would change what the model computes."""
    batch: list[int] = []
    for number in sorted(range(len(rows)), key=lambda number: (-len(rows[number].tokens), number)):
        longest = len(rows[batch[0]].tokens) if batch else 0
        is_other = alike_from is not None and alike_from < longest != len(rows[number].tokens)
        if batch and (is_other or longest * (len(batch) + 1) > most_tokens):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def padded(rows: Sequence[WindowRow], multiple: int = 1) -> tuple[Ids, Ids]:
    """Returns the tokens and labels of a batch. Padding is at the end of rows, where causal
    attention cannot see it, and has no labels. The length is a multiple of `multiple`."""
    length = -(-max(len(row.tokens) for row in rows) // multiple) * multiple
    tokens_BS = np.zeros((len(rows), length), np.int64)
    labels_BS = np.full((len(rows), length), IGNORED, np.int64)
    for number, row in enumerate(rows):
        tokens_BS[number, : len(row.tokens)] = row.tokens
        labels_BS[number, : len(row.labels)] = row.labels
    return tokens_BS, labels_BS
