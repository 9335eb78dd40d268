"""Kernels of generation: a plain PyTorch definition of each, and a Triton version (triton_*.py).

Those of training are in overland/kernels, which also decides where Triton runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """What a layer does to queries and keys before attention."""

    cos_Td: Tensor
    sin_Td: Tensor
    q_norm_d: Tensor | None = None
    k_norm_d: Tensor | None = None
    eps: float = 0.0
    window: int | None = None
