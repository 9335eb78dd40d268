"""Five axes of devices, from the slowest links to the fastest: pp, dp_replicate, dp_shard, cp, tp.

The order puts tensor parallel on neighbouring ranks, which launchers place inside one node. Ranks
along `cp` hold different tokens of the same rows, so for parameters they are like `dp_shard`: both
together are the axis `fsdp` that parameters are sharded over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overland.config.degrees import Degrees


@dataclass(frozen=True)
class Mesh:
    """The same devices, cut twice: as parameters see them, and as batches see them."""

    degrees: Degrees
    parameters: DeviceMesh  # pp, dp_replicate, fsdp, tp
    tokens: DeviceMesh  # pp, dp, cp, tp
    token_group: dist.ProcessGroup  # ranks that hold different tokens: dp × cp

    def axis(self, name: str) -> DeviceMesh:
        """One axis: pp, dp, cp or tp."""
        return self.tokens[name]

    def rank(self, axis: str) -> int:
        return self.tokens.get_local_rank(axis)

    @property
    def device_type(self) -> str:
        return self.tokens.device_type

    @property
    def dp_rank(self) -> int:
        """Which share of the batch this rank takes; ranks along cp, tp and pp take the same."""
        return self.rank("dp")

    @property
    def dp_size(self) -> int:
        return self.degrees.dp

    @property
    def shard_axes(self) -> DeviceMesh:
        """What FSDP is given: replicate across the first axis, shard across the second."""
        return self.parameters["dp_replicate", "fsdp"]


def build_mesh(degrees: Degrees, device_type: str) -> Mesh:
    d = degrees
    parameters = init_device_mesh(
        device_type,
        (d.pp, d.dp_replicate, d.dp_shard * d.cp, d.tp),
        mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"),
    )
    tokens = init_device_mesh(
        device_type, (d.pp, d.dp, d.cp, d.tp), mesh_dim_names=("pp", "dp", "cp", "tp")
    )
    together = init_device_mesh(
        device_type, (d.pp, d.dp * d.cp, d.tp), mesh_dim_names=("pp", "dp_cp", "tp")
    )
    return Mesh(d, parameters, tokens, together.get_group("dp_cp"))
