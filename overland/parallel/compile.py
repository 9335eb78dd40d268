"""torch.compile, block by block: one compilation serves all layers, and start-up stays short."""

from __future__ import annotations

import torch
from torch import nn

from overland.config.schema import Compile


def compile_blocks(layers: nn.ModuleDict, settings: Compile) -> None:
    if settings.enable:
        for block in layers.values():
            # Only the forward: the hooks of sharding stay outside the graph.
            block.forward = torch.compile(
                block.forward, backend=settings.backend, fullgraph=True, dynamic=False
            )
