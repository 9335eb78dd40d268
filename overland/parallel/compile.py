"""torch.compile, block by block: one compilation serves all layers, and start-up stays short."""

from __future__ import annotations

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.distributed.tensor import DTensor

from overland.config.schema import Compile
from overland.models.structure import blocks_of, find_module, structure_of


def compile_blocks(model: nn.Module, settings: Compile) -> None:
    assert settings.enable != "auto"  # it was settled by now
    if not settings.enable:
        return
    # What is compiled of 8-bit products is kept for the next start as all else is: both of their
    # passes are part of the graph that it is found by.
    functorch_config.autograd_cache_allow_custom_autograd_functions = True
    structure = structure_of(model)
    assert structure is not None
    others = (find_module(model, path) for path in structure.compiled)
    # A decoder's last norm is fourteen small kernels by itself; under tensor parallelism such
    # modules are left alone.
    whole = [
        module
        for module in others
        if module is not None and not any(isinstance(p, DTensor) for p in module.parameters())
    ]
    for block in [*blocks_of(model).values(), *whole]:
        # Only the forward: the hooks of sharding stay outside the graph.
        block.forward = torch.compile(
            block.forward, backend=settings.backend, fullgraph=True, dynamic=False
        )
