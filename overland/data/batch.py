"""A batch, which a step is given: rows with named fields, such as tokens, and what follows each of
them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from overland.data.order import mix64
from overland.data.rows import (
    ANSWERS,
    IGNORED,
    Rows,
    Samples,
    answers_apart,
    tokens_and_labels,
    with_borders,
)

ABOUT_ROWS = ("sample_B", "epoch_B", "weight_B")
"""Left out for rows of tokens: tokens and labels say it all, and earlier ledgers have no more."""


@dataclass(frozen=True)
class Batch:
    """Tensors by name, whose first dimension is the row.

    Rows of tokens have `tokens_BS` and `labels_BS`, and where borders of documents count also
    `positions_BS` and `documents_BS`; `weights_BS` is how much each label counts, where a source
    says so. Samples that are arrays have the fields that their source declares. Every row has the
    number of its sample, `sample_B`, and how often that was read before, `epoch_B`. `weight_B` is
    how much a row counts; without it, each counts once. A field whose name ends in `_BS` holds one
    number per token: context parallelism splits those, and no others.
    """

    fields: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def __len__(self) -> int:
        """Number of rows."""
        return len(next(iter(self.fields.values())))

    def get(self, name: str) -> Tensor | None:
        return self.fields.get(name)

    @property
    def device(self) -> torch.device:
        return next(iter(self.fields.values())).device

    def replace(self, **changed: Tensor) -> Batch:
        """The same rows with some fields changed or added."""
        return Batch({**self.fields, **changed})

    def without(self, *names: str) -> Batch:
        return Batch({name: value for name, value in self.fields.items() if name not in names})

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch({name: change(value) for name, value in self.fields.items()})

    def with_positions(self) -> Batch:
        """Adds the place of each token in its row, where nothing else says its position."""
        if "positions_BS" in self or "tokens_BS" not in self:
            return self
        tokens_BS = self["tokens_BS"]
        places_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        return self.replace(positions_BS=places_S.expand_as(tokens_BS))

    def at_places(self, places_of: Callable[[int], Tensor]) -> Batch:
        """The tokens at some places of each row; `places_of` says which, for a length."""
        cut = {
            name: value[:, places_of(value.shape[1]).to(value.device)].contiguous()
            for name, value in self.fields.items()
            if name.endswith("_BS")
        }
        return self.replace(**cut)

    def padded_from(self, row: int) -> Batch:
        """Lets rows from this one on count nothing: weight 0, and labels that are ignored."""
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


def make_batch(rows: Rows | Samples, document_mask: bool = False) -> Batch:
    """Makes tensors of rows. With a document mask, the model is told where documents begin."""
    fields = dict(rows.arrays) if isinstance(rows, Samples) else token_fields(rows, document_mask)
    fields |= {"sample_B": rows.sample, "epoch_B": rows.epoch}
    return Batch({name: torch.from_numpy(values) for name, values in fields.items()})


def token_fields(rows: Rows, document_mask: bool) -> dict[str, npt.NDArray[Any]]:
    names = ("tokens_BS", "labels_BS", "positions_BS", "documents_BS")
    if ANSWERS in rows.channels:
        rows, document_mask = answers_apart(rows), True
    arrays = with_borders(rows) if document_mask else tokens_and_labels(rows)
    # A channel is of the token that is predicted: a weight is that of its label.
    channels = {f"{name}_BS": values[:, 1:] for name, values in rows.channels.items()}
    return dict(zip(names, arrays, strict=False)) | channels


def digests(batch: Batch) -> Tensor:
    """Returns a number per row, of all bytes in it. Each place of each field has a multiplier
    of its own, and sums wrap around; one changed token always shows, any other change but for a
    chance of about 2⁻⁴⁶."""
    left_out = ABOUT_ROWS if "tokens_BS" in batch else ()
    total = torch.zeros(len(batch), dtype=torch.int64, device=batch.device)
    for name, values in sorted(batch.fields.items()):
        if name not in left_out:
            words = words_of(values)
            total += (words * _multipliers(name, words.shape[1], words.device)).sum(dim=1)
    return total


def words_of(values: Tensor) -> Tensor:
    """The bytes of each row as 64-bit integers, the last one filled up with zeros."""
    rows = values.reshape(len(values), -1)
    if rows.dtype == torch.int64:
        return rows
    rows = rows.contiguous().view(torch.uint8)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 8))
    return rows.view(torch.int64)


@lru_cache(maxsize=16)
def _multipliers(name: str, count: int, device: torch.device) -> Tensor:
    first = np.uint64(zlib.crc32(name.encode())) << np.uint64(32)
    numbers = mix64(first + np.arange(count, dtype=np.uint64)) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)
