"""Kernels: a plain PyTorch definition of each, and a Triton twin that NVIDIA GPUs run instead.

The twins are in the files triton_*.py, which alone import Triton, so they are imported late.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def triton_takes(tensor: Tensor) -> bool:
    """Kernels are tuned and checked on NVIDIA; elsewhere the twin computes."""
    return tensor.is_cuda and torch.version.hip is None and has_triton()


@cache
def has_triton() -> bool:
    from torch.utils import _triton

    return _triton.has_triton()
