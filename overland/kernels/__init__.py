"""Kernels: a plain PyTorch definition of each, and a Triton version that NVIDIA GPUs run instead.

The Triton versions are in the files triton_*.py; only these import Triton, so they are imported
late.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def triton_takes(tensor: Tensor) -> bool:
    """Whether the Triton kernels are used: they are tuned and tested on NVIDIA GPUs only."""
    return tensor.is_cuda and torch.version.hip is None and has_triton()


@cache
def has_triton() -> bool:
    from torch.utils import _triton

    return _triton.has_triton()
