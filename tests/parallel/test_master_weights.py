"""Split master weights on shards: FSDP gathers the bfloat16 weights themselves, and a run computes
what it computes with float32 shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives as fsdp_collectives
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
from torch import Tensor

from overland.apps.proofs.job import proof_job
from overland.apps.proofs.layout import Curve, curve
from overland.apps.proofs.layouts import parse
from overland.apps.proofs.pool import RankPool
from overland.config.schema import JobConfig
from overland.kernels import bfloat16
from overland.optimizers.optimizer import Optimizer
from overland.parallel import sharding
from overland.world import World

SHORT = ["tp2xshard2", "rep2xshard2", "shard2:accumulate", "shard2+lora"]
LONG = ["shard2", "rep2", "cp2", "pp2xshard2", "pp2xtp2", "shard2:zero2"]
LAYOUTS = [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]


def curves_split_and_whole(world: World, config: JobConfig) -> tuple[Curve, Curve]:
    """Returns the curves with split and with float32 shards. The latter are cast as the former are
    split, ties away from zero, so that all bits agree."""
    cast = fsdp_param._to_dtype_if_needed

    def cast_alike(given: Tensor, dtype: torch.dtype | None) -> Tensor:
        return bfloat16.split(given)[0] if dtype == torch.bfloat16 else cast(given, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "SPLIT_SHARDS", True)
        split = curve(world, config)
        patch.setattr(sharding, "SPLIT_SHARDS", False)
        patch.setattr(fsdp_param, "_to_dtype_if_needed", cast_alike)
        # FSDP casts many shards at a time where it can.
        each = lambda parameters: [one.all_gather_inputs for one in parameters]
        patch.setattr(fsdp_collectives, "_get_param_all_gather_inputs", each)
        return split, curve(world, config)


@pytest.mark.parametrize("name", LAYOUTS)
def test_split_shards_compute_what_float32_shards_compute(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    layout = parse(name)
    job = proof_job(layout, "bfloat16", 10, tmp_path)
    for split, whole in ranks.run(layout.num_ranks, curves_split_and_whole, job):
        assert split == whole


def curves_with_and_without_a_look(world: World, config: JobConfig) -> tuple[Curve, Curve]:
    """Returns the curve of a run whose weights are whole for a moment after each step, as when they
    are loaded or exported, and that of an undisturbed one."""
    update = Optimizer.update

    def update_and_look(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        with self.whole():
            assert {p.dtype for p in self.parameters} == {torch.float32}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "SPLIT_SHARDS", True)
        undisturbed = curve(world, config)
        patch.setattr(Optimizer, "update", update_and_look)
        return undisturbed, curve(world, config)


def test_split_shards_are_whole_where_they_are_read_and_written(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Also if one rank has fewer rows of a matrix than the others."""
    job = proof_job(parse("shard4"), "bfloat16", 4, tmp_path)
    job.model.overrides["vocab_size"] = 97
    for one, other in ranks.run(4, curves_with_and_without_a_look, job):
        assert one == other


def test_narrow_moments_are_rounded_alike_however_parameters_are_sharded(
    ranks: RankPool, tmp_path: Path
) -> None:
    losses = []
    for name in ("rep2", "shard2"):
        job = proof_job(parse(name), "bfloat16", 5, tmp_path / name)
        job.optimizer.bf16_moments = True
        job.training.max_norm = 0.0  # the norm is a sum over shards, so its last bit differs
        losses += [[loss for loss, _ in one] for one in ranks.run(2, curve, job)]
    assert all(one == losses[0] for one in losses)
