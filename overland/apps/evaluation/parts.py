"""Cuts documents into windows (context, stride) and parts, the unit that one rank computes at a
time and saves when it is done.

A part is a sequence of documents, or a sequence of windows of a long document. Where parts begin
and end, and which rows of a part share a batch, depends only on the documents. So any number of
ranks, restarted any number of times, computes the same numbers.

A text of n tokens has n - 1 predictions: of each token after the first, from those before it. A
model sees `context` tokens at a time, so a longer text is split into windows that start every
`stride` tokens. A window only counts tokens that no earlier window has predicted:

    context 4, stride 2     0 1 2 3 | 4 5 6 7 8       tokens
                            1 2 3 4                   the first window predicts four
                                2 3 [4] 5 6           the second counts the last two
                                      4 5 [6] 7 8     and so on: every token exactly once
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt

from overland.apps.evaluation.documents import Document, Ids
from overland.data.lanes import IGNORED
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError

LEAST_TOKENS = 2048  # in a part, since each finished part is written to disk
WINDOWS = 16  # in a part, at least
MOST_DOCUMENTS = 1024
TOGETHER = 64  # documents that are tokenized at once if all are joined into one text


@dataclass(frozen=True)
class WindowRow:
    """A window: the input tokens, and the label of each (-100: not counted)."""

    tokens: Ids
    labels: Ids

    @property
    def num_scored(self) -> int:
        return int((self.labels != IGNORED).sum())


@dataclass(frozen=True)
class WindowRows:
    """The windows of a part's documents."""

    rows: list[WindowRow]
    unscored: int = 0
    """First tokens of documents, which have nothing to be predicted from."""
    texts: Sequence[str] | None = ()
    """The documents that begin in this part; None for conversations, of which only some tokens are
    scored."""


@dataclass(frozen=True)
class EvaluationPart:
    number: int
    num_documents: int
    """The number of documents that begin in this part."""
    make: Callable[[], WindowRows]


@dataclass(frozen=True)
class Cutter:
    """Splits documents into parts, each document separately or all joined together."""

    tokenizer: Tokenizer
    context: int
    stride: int
    prefix: int | None = None
    """The token that a document's first token is predicted from; None: it is not scored, unless
    documents are joined, where EOS comes before all but the first."""
    joined: bool = False
    vocab_size: int | None = None
    _numbers: Iterator[int] = field(default_factory=lambda: iter(range(1 << 62)))

    @property
    def part_tokens(self) -> int:
        return max(LEAST_TOKENS, WINDOWS * self.context)

    @property
    def part_windows(self) -> int:
        return max(1, self.part_tokens // self.stride)

    def parts(self, documents: Iterable[Document]) -> Iterator[EvaluationPart]:
        yield from self._joined(documents) if self.joined else self._alone(documents)

    def _alone(self, documents: Iterable[Document]) -> Iterator[EvaluationPart]:
        together: list[Document] = []
        size = 0
        for document in documents:
            is_long = document.size >= self.part_tokens
            is_full = size >= self.part_tokens or len(together) == MOST_DOCUMENTS
            if together and (is_long or is_full):
                yield self._short(together)
                together, size = [], 0
            if is_long:
                yield from self._long(document)
            else:
                together.append(document)
                size += document.size
        if together:
            yield self._short(together)

    def _short(self, documents: list[Document]) -> EvaluationPart:
        def make() -> WindowRows:
            found = self._encode(documents)
            windows = map(self._windows, documents, found)
            rows = [row for one in windows for row in one.take(is_all=True)]
            return self._scored(rows, documents, found)

        return EvaluationPart(next(self._numbers), len(documents), make)

    def _long(self, document: Document) -> Iterator[EvaluationPart]:
        """Yields a document as one or more parts of its own; all ranks tokenize it."""
        (ids,) = self._encode([document])
        windows, begun = self._windows(document, ids), [document]
        while (rows := windows.take(self.part_windows, is_all=True)) or begun:
            make = partial(self._scored, rows, begun, [ids] * len(begun))
            yield EvaluationPart(next(self._numbers), len(begun), make)
            begun = []

    def _windows(self, document: Document, ids: Ids) -> TextWindows:
        windows = TextWindows(self.context, self.stride)
        windows.add([(ids, document.counts)])
        return windows

    def _scored(
        self, rows: Iterable[WindowRow], begun: Sequence[Document], encoded: Sequence[Ids]
    ) -> WindowRows:
        """Returns the windows that count; `begun` are the documents that begin with them."""
        some = [row for row in rows if row.num_scored]
        unscored = sum(map(self._unscored, begun, encoded))
        return WindowRows(some, unscored, self._texts(begun, encoded))

    def _joined(self, documents: Iterable[Document]) -> Iterator[EvaluationPart]:
        """Yields parts of one long text; all ranks tokenize all of it, some documents at a time."""
        text = TextWindows(self.context, self.stride)
        those: list[Document] = []
        encoded: list[Ids] = []
        source = iter(documents)
        before: Document | None = None
        while some := list(islice(source, TOGETHER)):
            found = self._encode(some)
            pieces: list[tuple[Ids, npt.NDArray[np.bool_] | None]] = []
            for document, ids in zip(some, found, strict=True):
                pieces += [(self._between(before, document), None), (ids, document.counts)]
                before = document
            text.add(pieces)
            those += some
            encoded += found
            while rows := text.take(self.part_windows):
                yield self._part_of_joined(rows, those, encoded)
                those, encoded = [], []
        while (rows := text.take(self.part_windows, is_all=True)) or those:
            yield self._part_of_joined(rows, those, encoded)
            those, encoded = [], []

    def _part_of_joined(
        self, rows: list[WindowRow], those: list[Document], encoded: list[Ids]
    ) -> EvaluationPart:
        number = next(self._numbers)
        # The very first token has nothing before it. A prefix is not part of the text.
        is_first = number == 0 and bool(rows) and those[0].counts is None
        unscored = int(is_first and rows[0].tokens[0] != self.prefix)

        def make() -> WindowRows:
            some = [row for row in rows if row.num_scored]
            return WindowRows(some, unscored, self._texts(those, encoded))

        return EvaluationPart(number, len(those), make)

    def _between(self, before: Document | None, document: Document) -> Ids:
        """Returns the special tokens between two joined documents: EOS after the one, and the
        prefix of the other, which is not written twice if it is EOS too."""
        eos = self.tokenizer.eos_id
        found = [eos] if before is not None and before.is_bare and eos is not None else []
        if document.is_bare and self.prefix is not None and found != [self.prefix]:
            found.append(self.prefix)
        return np.array(found, np.int64)

    def _encode(self, documents: Sequence[Document]) -> list[Ids]:
        """Returns the ids of each document; with any prefix, unless documents are joined."""
        texts = [one.text for one in documents if one.text is not None]
        encoded = iter(self.tokenizer.encode_documents(texts)) if texts else iter(())
        first, last = int(self.tokenizer.add_bos), int(self.tokenizer.add_eos)
        found = []
        for document in documents:
            ids = document.ids
            if ids is None:
                framed = next(encoded)
                ids = framed[first : len(framed) - last].astype(np.int64)
            if document.is_bare and self.prefix is not None and not self.joined:
                ids = np.concatenate([[self.prefix], ids])
            self._check(ids)
            found.append(ids)
        return found

    def _check(self, ids: Ids) -> None:
        largest = int(ids.max()) if len(ids) else 0
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise DataError(
                f"the data contains token {largest:,}, but the model's vocabulary has "
                f"{self.vocab_size:,}: the data was tokenized with another tokenizer, or "
                "--tokenizer is not the model's"
            )

    def _unscored(self, document: Document, ids: Ids) -> int:
        if document.counts is not None or not len(ids):
            return 0
        return 0 if document.is_bare and self.prefix is not None else 1

    def _texts(self, documents: Sequence[Document], found: Sequence[Ids]) -> list[str] | None:
        """Returns the texts of documents, or those that their token ids stand for."""
        if any(document.counts is not None for document in documents):
            return None
        return [
            self.tokenizer.decode(ids.tolist()) if document.text is None else document.text
            for document, ids in zip(documents, found, strict=True)
        ]


class TextWindows:
    """The windows of a text, which may grow."""

    def __init__(self, context: int, stride: int) -> None:
        self.context, self.stride = context, stride
        self.ids: Ids = np.empty(0, np.int64)
        self.counts = np.empty(0, np.bool_)
        """Which tokens are scored at all."""
        self.start = self.counted = 0
        """Positions in `ids`: where the next window begins, and how far tokens were predicted."""

    def add(self, some: Sequence[tuple[Ids, npt.NDArray[np.bool_] | None]]) -> None:
        """Adds tokens, and which of them are scored (None: all)."""
        self.ids = np.concatenate([self.ids, *(ids for ids, _ in some)])
        counts = (np.ones(len(ids), np.bool_) if these is None else these for ids, these in some)
        self.counts = np.concatenate([self.counts, *counts])

    def take(self, most: int = sys.maxsize, is_all: bool = False) -> list[WindowRow]:
        """Returns `most` windows, or none while there are fewer; with `is_all`, the rest."""
        last = len(self.ids) - 1
        if not is_all and last < self.start + (most - 1) * self.stride + self.context:
            return []
        rows: list[WindowRow] = []
        while len(rows) < most and self.counted < last:
            stop = min(self.start + self.context, last)
            labels = self.ids[self.start + 1 : stop + 1].copy()
            labels[: self.counted - self.start] = IGNORED  # an earlier window has predicted them
            labels[~self.counts[self.start + 1 : stop + 1]] = IGNORED
            rows.append(WindowRow(self.ids[self.start : stop], labels))
            self.start, self.counted = self.start + self.stride, stop
        # After the last window, which may be shorter than the stride, start is beyond the text.
        past = min(self.start, self.counted)
        self.ids, self.counts = self.ids[past:], self.counts[past:]
        self.start, self.counted = self.start - past, self.counted - past
        return rows
