"""One device has no one to share with, so nothing is sharded there and FSDP stays away.

FSDP on a world of one keeps float32 parameters and makes a bfloat16 copy of each, through the
buffers of its collectives, twice a step, and takes gradients back the same way: 42 bytes of traffic
per parameter and step for nothing. Here a parameter *is* its bfloat16 number, and the 16 bits that
rounding left over are kept by the optimizer (see optimizers/masters.py).
"""

from __future__ import annotations

from overland.config.schema import Training
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
