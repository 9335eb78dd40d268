"""float32 master weights, whole or split into a bfloat16 weight and a 16-bit remainder
(kernels/bfloat16.py).

While they are split, a parameter, or this rank's shard of it, *is* the bfloat16 weight: it is used,
or gathered by FSDP, without a copy in another dtype. The remainder is kept beside it for the
optimizer. Gradients of shards stay in float32, as they are reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overland.kernels.bfloat16 import join, split
from overland.parallel.sharding import (
    fix_gradient_dtype,
    reshard,
    shard_of,
    shard_owners,
    store_shard,
)


class MasterWeights:
    """The float32 parameters of a model. They are split for training, and whole again when they are
    loaded, saved or exported."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        # A tied parameter occurs once; frozen ones are also computed in bfloat16.
        found = {p: None for part in parts for p in part.parameters()}
        self.parts = parts
        self.parameters = [p for p in found if p.dtype == torch.float32]
        self.remainders: dict[nn.Parameter, Tensor] = {}  # empty: all are whole
        self.gradient_dtype: torch.dtype | None = None

    def split(self, gradient_dtype: torch.dtype | None = None) -> None:
        """Makes the parameters bfloat16 from now on. `gradient_dtype` is the dtype in which
        gradients are accumulated over several passes; a single pass needs no wider dtype."""
        fix_gradient_dtype(self.parts)
        reshard(self.parts)
        self.gradient_dtype, owners = gradient_dtype, shard_owners(self.parts)
        for parameter in self.parameters:
            narrow, self.remainders[parameter] = split(shard_of(parameter.detach()))
            store_shard(parameter, narrow, owners)
            dtype = torch.float32 if isinstance(parameter, DTensor) else gradient_dtype
            if dtype is not None and parameter.requires_grad:
                parameter.grad_dtype = dtype

    def join(self) -> None:
        reshard(self.parts)
        owners = shard_owners(self.parts)
        for parameter, remainder in self.remainders.items():
            store_shard(parameter, join(shard_of(parameter.detach()), remainder), owners)
        self.remainders = {}

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within this context the parameters are float32: what is read is exact, what is written is
        kept."""
        was_split = bool(self.remainders)
        self.join()
        try:
            yield
        finally:
            if was_split:
                self.split(self.gradient_dtype)
