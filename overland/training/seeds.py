"""Every random stream, seeded; and determinism where it is asked for."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

from overland.config.schema import Debug


def set_seeds(debug: Debug) -> None:
    """Weights and data order do not draw from these: they are pure functions of the seed. User code
    and libraries may."""
    random.seed(debug.seed)
    np.random.seed(debug.seed % 2**32)
    torch.manual_seed(debug.seed)
    if debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)
