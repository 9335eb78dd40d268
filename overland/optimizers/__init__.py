"""Optimizers: what each one defines, and what the framework does for all of them.

An optimizer is an *update rule*, a frozen dataclass whose fields are its options. It comes in two
kinds (`rule.py`):

    Elementwise    a pure function of a parameter, its gradient and its state; runs on shards
    WholeMatrix    needs a matrix in one piece; an owner rank gets it, and sends its result back

and it describes the state that it keeps of each parameter. Checkpoints, conversion, the memory
estimate and the rehearsal of a step rely on these descriptions and know no specific optimizer.

The framework (`optimizer.py`) divides gradients by the loss scale and clips them, keeps master
weights split on a single device, skips a step that is not finite without involving the host, and
gives every parameter the rates of its group. Importing this package does not import torch, so that
configs can be checked without it.
"""

from overland.optimizers.registry import register_optimizer
from overland.optimizers.rule import Elementwise, Like, Packed, Rates, Scalar, WholeMatrix

__all__ = [
    "Elementwise",
    "Like",
    "Packed",
    "Rates",
    "Scalar",
    "WholeMatrix",
    "register_optimizer",
]
