"""Kernels: a plain PyTorch definition of each, and a Triton version that GPUs run instead.

The Triton versions are in the files triton_*.py; only these import Triton, so they are imported
late. They are tuned on Hopper; on other GPUs a run tries them (training/kernel_trials.py).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import torch
from torch import Tensor

KERNELS = ("adamw", "cross_entropy", "float8", "nf4", "norm", "scale")
_in_use: Collection[str] = KERNELS if torch.version.hip is None else ()


def triton_takes(tensor: Tensor, kernel: str) -> bool:
    """Whether the Triton version of a kernel is used for this tensor."""
    return tensor.is_cuda and is_used(kernel) and has_triton()


def runs_triton(tensor: Tensor) -> bool:
    """Whether Triton versions that need no trial, those of generation, are used for a tensor."""
    return is_on_nvidia(tensor) and has_triton()


def is_used(kernel: str) -> bool:
    """Whether GPUs run the Triton version of a kernel, if they have Triton."""
    return kernel in _in_use


def use_only(kernels: Collection[str]) -> None:
    """Makes this process use the Triton versions of these kernels, and no others."""
    global _in_use
    _in_use = kernels


def is_on_nvidia(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.version.hip is None


@cache
def has_triton() -> bool:
    from torch.utils import _triton

    return _triton.has_triton()
