"""Five axes of devices, from the slowest links to the fastest: pp, dp_replicate, dp_shard, cp, tp.

The order puts tensor parallel on neighbouring ranks, which launchers place inside one node.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overland.config.degrees import Degrees

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """The device mesh with all five axes, each present even at degree 1."""

    devices: DeviceMesh
    degrees: Degrees

    @property
    def dp_rank(self) -> int:
        """Which share of the batch this rank takes; ranks along cp, tp and pp take the same."""
        replicate = self.devices["dp_replicate"].get_local_rank()
        return replicate * self.degrees.dp_shard + self.devices["dp_shard"].get_local_rank()

    @property
    def dp_size(self) -> int:
        return self.degrees.dp

    @property
    def shard_axes(self) -> DeviceMesh:
        """What FSDP is given: replicate across the first axis, shard across the second."""
        return self.devices["dp_replicate", "dp_shard"]


def build_mesh(degrees: Degrees, device_type: str) -> Mesh:
    shape = (degrees.pp, degrees.dp_replicate, degrees.dp_shard, degrees.cp, degrees.tp)
    return Mesh(init_device_mesh(device_type, shape, mesh_dim_names=AXES), degrees)
