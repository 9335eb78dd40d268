"""The random streams of a rank as tensors, to be saved and put back.

Weights and data order draw from none of these, being pure functions of the seed; dropout, users'
models and libraries do.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Tensor]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    streams: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
    }
    text = json.dumps(streams).encode()
    state = {
        "host": torch.frombuffer(bytearray(text), dtype=torch.uint8),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    streams = json.loads(bytes(state["host"].tolist()))
    version, internal, gauss = streams["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = streams["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "device" in state:
        torch.cuda.set_rng_state(state["device"], device)
