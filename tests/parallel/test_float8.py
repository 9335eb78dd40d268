"""8-bit products under every kind of layout. Casts round what differs from rank to rank, so the
layouts are proven with casts that lose nothing: then they must agree as wide products do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import overland.models.float8 as float8
from overland.apps.proofs.job import proof_job
from overland.apps.proofs.layout import Curve, curve, difference
from overland.apps.proofs.layouts import parse
from overland.apps.proofs.pool import RankPool
from overland.config.schema import JobConfig
from overland.world import World

NARROW = {"training": {"float8": "tensorwise"}}


def curve_with_casts_that_lose_nothing(world: World, job: JobConfig) -> Curve:
    kept = dict(vars(float8))
    float8.scale_for = lambda x, dtype, by_rows=True: torch.ones((), dtype=x.dtype)
    float8.cast = lambda x, scale, dtype: x.clone()
    float8.cast_transposed = lambda x, scale, dtype: x.t().clone()
    float8.cast_both = lambda x, scale, dtype: (x.clone(), x.t().clone())
    float8.product = lambda a, b, a_scale, b_scale, dtype: a @ b.t()
    try:
        return curve(world, job)
    finally:
        vars(float8).update(kept)


@pytest.mark.parametrize("name", ["shard2:op", "tp2:compile", "cp2", "pp2:InterleavedZeroBubble"])
def test_layouts_compute_the_same_products(ranks: RankPool, tmp_path: Path, name: str) -> None:
    layout = parse(name)
    alone = ranks.run(1, curve, proof_job(parse("shard1"), "float64", 3, tmp_path))[0]
    job = proof_job(layout, "float64", 3, tmp_path, NARROW)
    split = ranks.run(layout.num_ranks, curve_with_casts_that_lose_nothing, job)[0]
    assert max(difference(split, alone, which) for which in (0, 1)) < 1e-9


@pytest.mark.parametrize("name", ["tp2", pytest.param("shard2", marks=pytest.mark.long)])
def test_in_8_bits_two_ranks_stay_near_one(ranks: RankPool, tmp_path: Path, name: str) -> None:
    alone = ranks.run(1, curve, proof_job(parse("shard1"), "bfloat16", 5, tmp_path, NARROW))[0]
    wide = ranks.run(1, curve, proof_job(parse("shard1"), "bfloat16", 5, tmp_path))[0]
    split = ranks.run(2, curve, proof_job(parse(name), "bfloat16", 5, tmp_path, NARROW))[0]
    assert difference(split, alone, 0) < 1e-2
    assert 0 < difference(alone, wide, 0) < 1e-2
