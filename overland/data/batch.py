"""Makes a batch, the input of a training step: turns a rank's rows into named tensors on its
device, reads ahead, and masks rows beyond the last epoch.

Batch t is a function of the plan and t. A rank loads its share of the rows at the last moment, so
ranks, workers and restarts cannot change what is read; `read_ahead` does so while the previous step
computes. `apps/data/loader.py` is the loader on its own, for a user's own training scripts.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from overland.data.lanes import IGNORED, Rows, Samples, tokens_and_labels, with_borders
from overland.data.sampler import Sampler
from overland.data.shard import ANSWERS, CHOSEN, REJECTED

Array = npt.NDArray[np.int64]
CPU = torch.device("cpu")
CLOSE_SECONDS = 10.0  # longest wait, at the end of a run, for a batch that is being read
T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """Tensors by name, whose first dimension is the row.

    Rows of tokens have `tokens_BS` and `labels_BS` and, with document boundaries, `positions_BS`
    and `documents_BS`; `weights_BS` is the loss weight of each label, if the source has weights.
    Samples of arrays have the fields that their source declares. Every row has the number of its
    sample, `sample_B`, and how many times that was read before, `epoch_B`. `weight_B` is the loss
    weight of a row; without it, each row counts once. A field whose name ends in `_BS` holds one
    number per token: context parallelism splits these fields, and no others.
    """

    fields: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(next(iter(self.fields.values())))

    def get(self, name: str) -> Tensor | None:
        return self.fields.get(name)

    @property
    def device(self) -> torch.device:
        return next(iter(self.fields.values())).device

    def replace(self, **changed: Tensor) -> Batch:
        """Returns the same rows with some fields changed or added."""
        return Batch({**self.fields, **changed})

    def without(self, *names: str) -> Batch:
        return Batch({name: value for name, value in self.fields.items() if name not in names})

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch({name: change(value) for name, value in self.fields.items()})

    def with_positions(self) -> Batch:
        """Adds the index of each token in its row, unless the batch already has positions."""
        if "positions_BS" in self or "tokens_BS" not in self:
            return self
        tokens_BS = self["tokens_BS"]
        places_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        return self.replace(positions_BS=places_S.expand_as(tokens_BS))

    def at_places(self, places_of: Callable[[int], Tensor]) -> Batch:
        """Returns the tokens at some places of each row, which `places_of` computes from a
        length."""
        cut = {
            name: value[:, places_of(value.shape[1]).to(value.device)].contiguous()
            for name, value in self.fields.items()
            if name.endswith("_BS")
        }
        return self.replace(**cut)

    def padded_from(self, row: int) -> Batch:
        """Masks the rows from this one on: weight 0, and labels that are ignored."""
        weight_B = self.get("weight_B")
        weight_B = torch.ones(len(self)) if weight_B is None else weight_B.clone()
        weight_B[max(row, 0) :] = 0
        changed = {"weight_B": weight_B}
        for name, nothing in (("labels_BS", IGNORED), ("weights_BS", 0)):
            if name in self:
                changed[name] = self[name].where(weight_B[:, None] != 0, nothing)
        return self.replace(**changed)

    def to(self, device: torch.device) -> Batch:
        if device.type != "cuda":
            return self.map(Tensor.contiguous)
        return self.map(lambda x: x.pin_memory().to(device, non_blocking=True))

    def split(self, rows: int) -> Iterator[Batch]:
        for start in range(0, len(self), rows):
            yield self.map(lambda x, start=start: x[start : start + rows])  # type: ignore[misc]


def load_batch(rows: Sampler, batch: int, part: int = 0, num_parts: int = 1) -> Batch:
    """Loads a rank's share of a global batch. Rows beyond the last epoch are masked."""
    segment = rows.plan.segment(batch)
    share = make_batch(rows.read(batch, part, num_parts), segment.document_mask)
    count = rows.num_rows(batch)
    if count == segment.global_batch_size:
        return share
    # On every rank, because all shares of a batch must have the same fields.
    return share.padded_from(count - part * len(share))


def batches(
    rows: Sampler, start: int, part: int = 0, num_parts: int = 1, device: torch.device = CPU
) -> Iterator[Batch]:
    """Yields this rank's share of global batch `start` and of all following batches."""
    for number in itertools.count(start):
        yield load_batch(rows, number, part, num_parts).to(device)


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


def make_batch(rows: Rows | Samples, document_mask: bool = False) -> Batch:
    """Turns rows into tensors. With a document mask, they include where documents begin."""
    fields = dict(rows.arrays) if isinstance(rows, Samples) else token_fields(rows, document_mask)
    fields |= {"sample_B": rows.sample, "epoch_B": rows.epoch}
    return Batch({name: torch.from_numpy(values) for name, values in fields.items()})


def token_fields(rows: Rows, document_mask: bool) -> dict[str, npt.NDArray[Any]]:
    names = ("tokens_BS", "labels_BS", "positions_BS", "documents_BS")
    if ANSWERS in rows.channels:
        rows, document_mask = answers_apart(rows), True
    arrays = with_borders(rows) if document_mask else tokens_and_labels(rows)
    # A channel belongs to the predicted token: a weight is the weight of its label.
    channels = {f"{name}_BS": values[:, 1:] for name, values in rows.channels.items()}
    return dict(zip(names, arrays, strict=False)) | channels


def answers_apart(rows: Rows) -> Rows:
    """Returns rows of pairs in which the second answer begins a document of its own."""
    answers = rows.channels[ANSWERS]
    begins = rows.begins.copy()
    begins[:, 1:] |= (answers[:, :-1] == CHOSEN) & (answers[:, 1:] == REJECTED)
    return replace(rows, begins=begins)
