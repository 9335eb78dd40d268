"""A batch, the input of a training step: rows with named fields, such as tokens and labels.

`Rows` and `Samples` are the rows as they are read; `make_batch` turns them into tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from overland.data.order import mix64
from overland.data.shard import ANSWERS, CHOSEN, REJECTED, WEIGHTS

Array = npt.NDArray[np.int64]
IGNORED = -100  # label without a loss
ABOUT_ROWS = ("sample_B", "epoch_B", "weight_B")
"""Not part of the digest of token rows: tokens and labels suffice, and earlier ledgers have only
those."""


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


def digests(batch: Batch) -> Tensor:
    """Returns a digest of each row, over all of its bytes. Each place of each field has its own
    multiplier, and sums wrap around. A single changed token always changes the digest; any other
    change goes unnoticed with a probability of about 2⁻⁴⁶."""
    left_out = ABOUT_ROWS if "tokens_BS" in batch else ()
    total = torch.zeros(len(batch), dtype=torch.int64, device=batch.device)
    for name, values in sorted(batch.fields.items()):
        if name not in left_out:
            words = words_of(values)
            total += (words * _multipliers(name, words.shape[1], words.device)).sum(dim=1)
    return total


def words_of(values: Tensor) -> Tensor:
    """Returns the bytes of each row as 64-bit integers, padded with zeros."""
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
