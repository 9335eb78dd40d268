"""Digests of rows, taken where the rows lie: of the very tensors that the model is given."""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np
import torch

from overland.data.batch import Batch
from overland.data.order import mix


def digests(batch: Batch) -> torch.Tensor:
    """A number per row, of everything in it. Each place of each field has a multiplier of its own,
    and sums wrap around; one changed token always shows, any other change but for a chance of
    about 2⁻⁴⁶."""
    parts = [(name, value) for name, value in sorted(vars(batch).items()) if value is not None]
    total = torch.zeros(len(batch.tokens_BS), dtype=torch.int64, device=batch.tokens_BS.device)
    for name, values in parts:
        total += (values * _multipliers(name, values.shape[1], values.device)).sum(dim=1)
    return total


@lru_cache(maxsize=16)
def _multipliers(name: str, count: int, device: torch.device) -> torch.Tensor:
    first = np.uint64(zlib.crc32(name.encode())) << np.uint64(32)
    numbers = mix(first + np.arange(count, dtype=np.uint64)) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)
