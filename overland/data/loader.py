"""Blocks to batches: global batch t is a pure function of the data, the seed and t.

Row i of the run is block `permute(i mod n)` of epoch `i div n`: each block comes once per epoch, in
another order each time. Batch t holds rows [t·B, (t+1)·B); a rank takes its share of them at the
last moment. No rank, worker count or restart enters, so none can change what is read.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from overland.data.batch import IGNORED, Batch
from overland.data.errors import DataError
from overland.data.order import permute
from overland.data.shards import TokenShards

CLOSE_SECONDS = 10.0  # longest wait for a batch that is being read when the run ends

T = TypeVar("T")
Row = dict[str, npt.NDArray[np.int64]]


class Blocks(Protocol):
    """Something that gives the rows of a run by number."""

    def rows(self, numbers: npt.NDArray[np.int64]) -> Batch: ...


class ShardBlocks:
    """Blocks of `seq_len` tokens cut from token shards, shuffled anew in every epoch."""

    def __init__(
        self,
        shards: TokenShards,
        seq_len: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        document_mask: bool = False,
    ) -> None:
        self.shards, self.seq_len, self.seed = shards, seq_len, seed
        self.shuffle, self.document_mask = shuffle, document_mask
        # The label of a block's last token is the first token of the next block.
        self.num_blocks = (shards.info.num_tokens - 1) // seq_len
        if self.num_blocks < 1:
            raise DataError(
                f"the data holds {shards.info.num_tokens:,} tokens: too few for one block of "
                f"seq_len = {seq_len:,}"
            )

    def rows(self, numbers: npt.NDArray[np.int64]) -> Batch:
        return _stack([self._read(int(block)) for block in self._blocks(numbers)])

    def _blocks(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        epochs, places = np.divmod(numbers, self.num_blocks)
        if self.shuffle:
            for epoch in np.unique(epochs):
                now = epochs == epoch
                places[now] = permute(places[now], self.num_blocks, "blocks", self.seed, int(epoch))
        return places

    def _read(self, block: int) -> Row:
        start, stop = block * self.seq_len, (block + 1) * self.seq_len
        tokens = self.shards.read(start, stop + 1)
        if not self.document_mask:
            return {"tokens_BS": tokens[:-1], "labels_BS": tokens[1:]}
        return _row_of_documents(tokens, self.shards.documents(start, stop + 1))


class RandomTokens:
    """Uniform random ids, for proofs and benchmarks: row i depends on the seed and i alone.

    With a document mask, a row holds about `DOCUMENTS_PER_ROW` documents.
    """

    DOCUMENTS_PER_ROW = 4

    def __init__(
        self, vocab_size: int, seq_len: int, seed: int = 0, *, document_mask: bool = False
    ) -> None:
        self.vocab_size, self.seq_len, self.seed = vocab_size, seq_len, seed
        self.document_mask = document_mask

    def rows(self, numbers: npt.NDArray[np.int64]) -> Batch:
        return _stack([self._row(int(number)) for number in numbers])

    def _row(self, number: int) -> Row:
        draw = np.random.default_rng((self.seed, number))
        tokens = draw.integers(self.vocab_size, size=self.seq_len + 1)
        if not self.document_mask:
            return {"tokens_BS": tokens[:-1], "labels_BS": tokens[1:]}
        borders = draw.random(self.seq_len + 1) < self.DOCUMENTS_PER_ROW / self.seq_len
        return _row_of_documents(tokens, np.cumsum(borders))


def batches(
    blocks: Blocks, start: int, global_batch_size: int, part: int = 0, num_parts: int = 1
) -> Iterator[Batch]:
    """This rank's rows of global batch `start` and all that follow."""
    rows_per_part = global_batch_size // num_parts
    number = start
    while True:
        first = number * global_batch_size + part * rows_per_part
        yield blocks.rows(np.arange(first, first + rows_per_part))
        number += 1


def read_ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """The same items, prepared by a thread while the consumer computes."""
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(item: T | None, error: BaseException | None) -> None:
        while not stop.is_set():
            try:
                return ready.put((item, error), timeout=0.1)
            except queue.Full:
                continue

    def fill() -> None:
        try:
            for item in items:
                put(item, None)
                if stop.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:
            put(None, error)

    thread = threading.Thread(target=fill, daemon=True, name="read-ahead")
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        stop.set()
        # A daemon thread that is inside torch while Python ends aborts the whole process.
        thread.join(timeout=CLOSE_SECONDS)


def _row_of_documents(tokens: npt.NDArray[np.int64], documents: npt.NDArray[np.int64]) -> Row:
    """A row in which no loss is taken across a border and each document counts from 0."""
    here, following = documents[:-1], documents[1:]
    return {
        "tokens_BS": tokens[:-1],
        "labels_BS": np.where(here == following, tokens[1:], IGNORED),
        "documents_BS": here - here[0],
        "positions_BS": _positions(here),
    }


def _stack(rows: list[Row]) -> Batch:
    return Batch(**{key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]})


def _positions(documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Positions counted from the start of each document within the row."""
    places = np.arange(len(documents))
    is_start = np.concatenate(([True], documents[1:] != documents[:-1]))
    return places - np.maximum.accumulate(np.where(is_start, places, 0))
