"""Five axes of devices, from the slowest links to the fastest: pp, dp_replicate, dp_shard, cp, tp.

The order puts tensor parallelism on neighboring ranks, which launchers place inside one node. The
same ranks are divided in several ways, each a list of groups of consecutive axes:

    parameters    pp, dp_replicate, dp_shard × cp (fsdp), tp     who holds which part of a parameter
    tokens        pp, dp_replicate × dp_shard (dp), cp, tp       who gets which part of a batch
    sums          pp, dp × cp (dp_cp), tp                        who sums over tokens

Ranks along `cp` hold different tokens of the same rows, so for parameters they act like `dp_shard`.
A new way to place parameters (experts) needs one more line here.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from overland.config.derived import Degrees

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# Cut → its parts by name → the axes of each part. Parts of the same name are the same in all cuts.
CUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "parameters": {
        "pp": ("pp",),
        "dp_replicate": ("dp_replicate",),
        "fsdp": ("dp_shard", "cp"),
        "tp": ("tp",),
    },
    "tokens": {"pp": ("pp",), "dp": ("dp_replicate", "dp_shard"), "cp": ("cp",), "tp": ("tp",)},
    "sums": {"pp": ("pp",), "dp_cp": ("dp_replicate", "dp_shard", "cp"), "tp": ("tp",)},
}
REPLICAS = ("dp_replicate",)
"""Parts of `parameters` along which ranks hold the same."""
SHARDS = tuple(part for part in CUTS["parameters"] if part not in (*REPLICAS, "pp"))
"""Parts of `parameters` along which ranks may hold different pieces of a parameter."""


@dataclass(frozen=True)
class Mesh:
    """The same devices, divided in several ways."""

    degrees: Degrees
    cuts: dict[str, DeviceMesh]
    groups: list[dist.ProcessGroup]
    """Every group of this rank, once, in the same order on all its ranks."""

    @property
    def parameters(self) -> DeviceMesh:
        return self.cuts["parameters"]

    @property
    def tokens(self) -> DeviceMesh:
        return self.cuts["tokens"]

    @property
    def token_group(self) -> dist.ProcessGroup:
        """Ranks that hold different tokens: dp × cp."""
        return self.cuts["sums"].get_group("dp_cp")

    def axis(self, name: str) -> DeviceMesh:
        """Returns one axis of the batch: pp, dp, cp or tp."""
        return self.tokens[name]

    def rank(self, axis: str) -> int:
        return self.tokens.get_local_rank(axis)

    @property
    def device_type(self) -> str:
        return self.tokens.device_type

    @property
    def dp_rank(self) -> int:
        """This rank's share of the batch; ranks along cp, tp and pp have the same."""
        return self.rank("dp")

    @property
    def dp_size(self) -> int:
        return self.degrees.dp

    @property
    def shard_axes(self) -> DeviceMesh:
        """The mesh for FSDP: it replicates across the first axis and shards across the second."""
        return self.parameters["dp_replicate", "fsdp"]


def build_mesh(degrees: Degrees, device_type: str, timeout_seconds: int = 1800) -> Mesh:
    """Divides all ranks, each of which calls this. `timeout_seconds`: of collectives, until it is
    set again.

    Parts with the same ranks share a group, since a group costs connections and memory; only cp's
    collectives have one of their own, so that they need not wait for parameters on their way."""
    ranks = torch.arange(dist.get_world_size()).view([getattr(degrees, axis) for axis in AXES])
    by_members = dist.get_backend() != "mpi"  # where all ranks must create all groups
    assert dist.group.WORLD is not None
    groups = {(_divided(degrees, AXES), False): dist.group.WORLD}

    def group_of(part: str, axes: tuple[str, ...]) -> dist.ProcessGroup:
        axes = _divided(degrees, axes)
        key = (axes, part == "cp" and bool(axes))
        if key not in groups:
            order = sorted(range(len(AXES)), key=lambda axis: AXES[axis] in axes)
            size = prod(getattr(degrees, axis) for axis in axes)
            for members in ranks.permute(order).reshape(-1, size).tolist():
                is_mine = dist.get_rank() in members
                if is_mine or not by_members:
                    group = dist.new_group(
                        members,
                        timedelta(seconds=timeout_seconds),
                        use_local_synchronization=by_members,
                        group_desc=part,
                    )
                if is_mine:
                    groups[key] = group
        return groups[key]

    def cut(parts: dict[str, tuple[str, ...]]) -> DeviceMesh:
        assert tuple(axis for axes in parts.values() for axis in axes) == AXES
        return DeviceMesh.from_group(
            [group_of(part, axes) for part, axes in parts.items()],
            device_type,
            ranks.view([prod(getattr(degrees, axis) for axis in axes) for axes in parts.values()]),
            mesh_dim_names=tuple(parts),
        )

    cuts = {name: cut(parts) for name, parts in CUTS.items()}
    return Mesh(degrees, cuts, list(groups.values()))


def _divided(degrees: Degrees, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes that have several ranks."""
    return tuple(axis for axis in axes if getattr(degrees, axis) > 1)
