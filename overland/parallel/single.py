"""One device has no one to share with, so nothing is sharded there and FSDP stays away.

FSDP on a world of one keeps float32 parameters and makes a bfloat16 copy of each, through the
buffers of its collectives, twice a step, and takes gradients back the same way: 42 bytes of traffic
per parameter and step for nothing. Here a parameter *is* its bfloat16 number, and the 16 bits that
rounding left over are kept beside it for the optimizer (see kernels/split.py). The two together are
the float32 master, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from overland.config.schema import Training
from overland.kernels.split import join, split
from overland.parallel.mesh import Mesh

HALVES = ("float32", "bfloat16")  # kept in the one, computed with in the other


def is_single(mesh: Mesh, training: Training) -> bool:
    """Whether a model stays whole and plain. Offloading and float16 are left to FSDP."""
    kinds = (training.dtype, training.mixed_precision_param)
    plain = kinds[0] == kinds[1] or kinds == HALVES
    return mesh.degrees.world_size == 1 and not training.enable_cpu_offload and plain


def splits(mesh: Mesh, training: Training) -> bool:
    """Whether parameters are kept in halves."""
    kinds = (training.dtype, training.mixed_precision_param)
    return is_single(mesh, training) and kinds == HALVES


class Masters:
    """float32 parameters, whole or split. They are split for training, and whole again wherever
    they are filled, saved or exported."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        # A tied parameter is met once; frozen ones are computed with in bfloat16 too.
        found = {p: None for part in parts for p in part.parameters()}
        self.parameters = [p for p in found if p.dtype == torch.float32]
        self.rests: dict[nn.Parameter, Tensor] = {}  # empty: all are whole
        self.gradient_dtype: torch.dtype | None = None

    def split(self, gradient_dtype: torch.dtype | None = None) -> None:
        """From here on the parameters are bfloat16. `gradient_dtype` is what their gradients are
        summed in, where several passes add up; a single one needs no wider type than its own."""
        self.gradient_dtype = gradient_dtype
        for parameter in self.parameters:
            parameter.data, self.rests[parameter] = split(parameter.data)
            if gradient_dtype is not None and parameter.requires_grad:
                parameter.grad_dtype = gradient_dtype

    def join(self) -> None:
        for parameter, rest in self.rests.items():
            parameter.data = join(parameter.data, rest)
        self.rests = {}

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the parameters are float32: what is read is exact, what is written is kept."""
        was_split = bool(self.rests)
        self.join()
        try:
            yield
        finally:
            if was_split:
                self.split(self.gradient_dtype)
