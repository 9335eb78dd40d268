"""Loads the batches of a rank while the previous step computes.

Batch t is a function of the plan and t. A rank takes its share of the rows at the last moment, so
ranks, workers and restarts cannot change what is read.

`apps/data/loader.py` is the loader on its own, for a user's own training scripts.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

from overland.data.batch import Batch, make_batch
from overland.data.sampler import Sampler

CLOSE_SECONDS = 10.0  # longest wait, at the end of a run, for a batch that is being read
T = TypeVar("T")


def load_batch(rows: Sampler, batch: int, part: int = 0, num_parts: int = 1) -> Batch:
    """Loads a rank's share of a global batch. Rows beyond the last epoch are masked."""
    segment = rows.plan.segment(batch)
    if rows.arrays is not None:
        share = make_batch(rows.read_samples(batch, part, num_parts))
    else:
        share = make_batch(rows.read(batch, part, num_parts), segment.document_mask)
    count = rows.num_rows(batch)
    if count == segment.global_batch_size:
        return share
    # On every rank, because all shares of a batch must have the same fields.
    return share.padded_from(count - part * len(share))


def batches(rows: Sampler, start: int, part: int = 0, num_parts: int = 1) -> Iterator[Batch]:
    """Yields this rank's share of global batch `start` and of all following batches."""
    number = start
    while True:
        yield load_batch(rows, number, part, num_parts)
        number += 1


def read_ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yields the same items, which a thread prepares while the consumer computes."""
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
        # A daemon thread that is inside torch when Python exits aborts the whole process.
        thread.join(timeout=CLOSE_SECONDS)
