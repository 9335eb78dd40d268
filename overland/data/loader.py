"""Batches for a rank, made ready while the step before computes.

Batch t is a function of the plan and t. A rank takes its share of the rows at the last moment; no
rank, worker or restart enters, so none can change what is read.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

from overland.data.batch import Batch, make_batch
from overland.data.rows import PlannedRows

CLOSE_SECONDS = 10.0  # longest wait for a batch that is being read when the run ends

T = TypeVar("T")


def load(rows: PlannedRows, batch: int, part: int = 0, num_parts: int = 1) -> Batch:
    """One rank's share of a global batch. What lies beyond the last epoch counts nothing."""
    segment = rows.plan.segment(batch)
    if rows.arrays is not None:
        share = make_batch(rows.read_samples(batch, part, num_parts))
    else:
        share = make_batch(rows.read(batch, part, num_parts), segment.document_mask)
    count = rows.num_rows(batch)
    if count == segment.global_batch_size:
        return share
    # On every rank: shares of one batch have the same fields.
    return share.padded_from(count - part * len(share))


def batches(rows: PlannedRows, start: int, part: int = 0, num_parts: int = 1) -> Iterator[Batch]:
    """This rank's share of global batch `start` and of all that follow."""
    number = start
    while True:
        yield load(rows, number, part, num_parts)
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
