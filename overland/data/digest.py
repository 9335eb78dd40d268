"""Digests of rows, taken where the rows lie: of the very tensors that the model is given."""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from overland.data.batch import Batch
from overland.data.order import mix

ABOUT_ROWS = ("sample_B", "epoch_B", "weight_B")
"""Left out for rows of tokens: tokens and labels say it all, and earlier ledgers have no more."""


def digests(batch: Batch) -> Tensor:
    """A number per row, of all bytes in it. Each place of each field has a multiplier of its own,
    and sums wrap around; one changed token always shows, any other change but for a chance of
    about 2⁻⁴⁶."""
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
    numbers = mix(first + np.arange(count, dtype=np.uint64)) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)
