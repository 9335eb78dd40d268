"""The random streams of a rank as tensors of a fixed size, to be saved and put back.

Weights and data order draw from none of these, being pure functions of the seed; dropout, users'
models and libraries do.
"""

from __future__ import annotations

import random
import struct

import numpy as np
import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Tensor]:
    version, internal, gauss = random.getstate()
    python = [version, *internal, gauss is not None, _bits(gauss or 0.0)]
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy = [*np.asarray(keys).tolist(), position, has_gauss, _bits(float(cached))]
    state = {
        "python": torch.tensor(python, dtype=torch.int64),
        "numpy": torch.tensor(numpy, dtype=torch.int64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    version, *internal, has_gauss, gauss = state["python"].tolist()
    random.setstate((version, tuple(internal), _number(gauss) if has_gauss else None))
    *keys, position, has_gauss, gauss = state["numpy"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, _number(gauss))
    )
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "device" in state:
        torch.cuda.set_rng_state(state["device"], device)


def _bits(number: float) -> int:
    """A float64 as the int64 of the same bits."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
