"""The parallel degrees of a run, worked out for a world size (without torch)."""

from __future__ import annotations

from dataclasses import dataclass

from overland.config.schema import Parallelism
from overland.errors import Kind, OverlandError


@dataclass(frozen=True)
class Degrees:
    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    reshard_after_forward: bool

    @property
    def dp(self) -> int:
        """Shares that the global batch is cut into."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp


class DegreeError(OverlandError, ValueError):
    """The degrees do not fit the world."""

    kind = Kind.CONFIG


def resolve_degrees(parallelism: Parallelism, world_size: int, ranks_per_node: int = 1) -> Degrees:
    """Fills in "the rest" and the sharding stage's shorthand, and checks that the product fits."""
    p = parallelism
    fixed = p.pipeline_parallel_degree * p.context_parallel_degree * p.tensor_parallel_degree
    if world_size % fixed:
        raise DegreeError(
            f"pipeline {p.pipeline_parallel_degree} × context {p.context_parallel_degree} × tensor "
            f"{p.tensor_parallel_degree} = {fixed} does not divide the {world_size} devices"
        )
    replicate, shard = _data_parallel(p, world_size // fixed, max(1, ranks_per_node // fixed))
    if replicate * shard * fixed != world_size:
        raise DegreeError(
            f"replicate {replicate} × shard {shard} × pipeline {p.pipeline_parallel_degree} × "
            f"context {p.context_parallel_degree} × tensor {p.tensor_parallel_degree} = "
            f"{replicate * shard * fixed}, but there are {world_size} devices; "
            f"data_parallel_shard_degree = -1 takes the rest"
        )
    return Degrees(
        pp=p.pipeline_parallel_degree,
        dp_replicate=replicate,
        dp_shard=shard,
        cp=p.context_parallel_degree,
        tp=p.tensor_parallel_degree,
        reshard_after_forward=_reshards(p),
    )


def smallest_world(parallelism: Parallelism) -> int:
    """The fewest devices that the degrees fit on."""
    p = parallelism
    data = p.data_parallel_replicate_degree * max(1, p.data_parallel_shard_degree)
    return data * p.pipeline_parallel_degree * p.context_parallel_degree * p.tensor_parallel_degree


def _data_parallel(p: Parallelism, dp: int, dp_per_node: int) -> tuple[int, int]:
    """(replicate, shard) for `dp` data-parallel ranks."""
    stage = p.sharding_stage
    if stage == "zero0":
        return dp, 1
    if stage in ("zero2_hybrid", "zero3_hybrid"):
        shard = min(dp, dp_per_node)
        return dp // shard, shard
    if p.data_parallel_shard_degree == -1:
        return p.data_parallel_replicate_degree, max(1, dp // p.data_parallel_replicate_degree)
    return p.data_parallel_replicate_degree, p.data_parallel_shard_degree


def _reshards(p: Parallelism) -> bool:
    if p.sharding_stage is not None:
        return p.sharding_stage.startswith("zero3")
    if p.fsdp_reshard_after_forward == "default":
        return p.pipeline_parallel_degree == 1
    return p.fsdp_reshard_after_forward == "always"
