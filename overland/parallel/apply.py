"""The order in which a model is made parallel. Each line changes the model in place.

Recompute wraps blocks, compile sees the recomputation, and sharding comes last, so that its hooks
run outside the compiled code.
"""

from __future__ import annotations

from torch import nn

from overland.config.schema import JobConfig
from overland.models.decoder import Decoder
from overland.parallel.compile import compile_blocks
from overland.parallel.mesh import Mesh
from overland.parallel.recompute import recompute
from overland.parallel.shard import shard


def parallelize(model: nn.Module, mesh: Mesh, config: JobConfig) -> None:
    """Picks the order for this kind of model; an unknown kind is sharded as one piece."""
    if isinstance(model, Decoder):
        parallelize_decoder(model, mesh, config)
    else:
        shard(model, [], mesh, config.training)


def parallelize_decoder(model: Decoder, mesh: Mesh, config: JobConfig) -> None:
    layers = model.model.layers
    recompute(layers, config.activation_checkpoint)
    compile_blocks(layers, config.compile)
    shard(model, list(layers.values()), mesh, config.training)
