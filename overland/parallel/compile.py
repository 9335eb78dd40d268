"""torch.compile, block by block: one compilation serves all layers, and start-up stays short."""

from __future__ import annotations

import torch
from torch._functorch import config as functorch_config
from torch.distributed.tensor import DTensor

from overland.config.schema import Compile
from overland.models.decoder import Decoder


def compile_blocks(model: Decoder, settings: Compile) -> None:
    assert settings.enable != "auto"  # it was settled by now
    if not settings.enable:
        return
    # What is compiled of 8-bit products is kept for the next start as all else is: both of their
    # passes are part of the graph that it is found by.
    functorch_config.autograd_cache_allow_custom_autograd_functions = True
    blocks = list(model.model.layers.values())
    norm = model.model.norm
    # The last norm is fourteen small kernels by itself; under tensor parallelism it is left alone.
    if norm is not None and not isinstance(norm.weight, DTensor):
        blocks.append(norm)
    for block in blocks:
        # Only the forward: the hooks of sharding stay outside the graph.
        block.forward = torch.compile(
            block.forward, backend=settings.backend, fullgraph=True, dynamic=False
        )
