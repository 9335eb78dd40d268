"""An optimizer computes the same under every layout, and resumes in any of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from overland.apps.convert import convert
from overland.apps.proofs.job import proof_job
from overland.apps.proofs.layout import TOLERANCES, Curve, curve, difference
from overland.apps.proofs.layouts import parse
from overland.apps.proofs.pool import RankPool
from overland.checkpoint.read import open_checkpoint
from overland.config.schema import JobConfig
from overland.world import World

SAVED_AT, STEPS = 2, 4
Curves = dict[tuple[str, tuple[str, ...]], Curve]


def job(name: str, layout: str, folder: Path, steps: int, save: bool) -> JobConfig:
    parsed = parse(layout)
    settings = {
        "job": {"custom_import": "tests.optimizers.own"},
        "optimizer": {"name": name},
        "lr_scheduler": {"total_steps": STEPS},
        "checkpoint": {"enable": save, "interval": SAVED_AT},
    }
    return proof_job(parsed, "float64", steps, folder, settings)


def run(
    pool: RankPool, name: str, layout: str, folder: Path, steps: int = STEPS, save: bool = True
) -> Curve:
    config = job(name, layout, folder, steps, save)
    return pool.run(parse(layout).num_ranks, curve, config)[0]


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Curves:
    """One process that never stops."""
    folder = tmp_path_factory.mktemp("alone")
    wanted = [("Lion", "shard1"), ("Muon", "shard1"), ("Muon", "shard1+tied")]
    return {
        (name, parse(layout).kinds): run(ranks, name, layout, folder, save=False)
        for name, layout in wanted
    }


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("Lion", "tp2"),
        ("Lion", "shard2"),
        ("Muon", "shard4"),
        ("Muon", "tp2xshard2"),
        ("Muon", "rep2xshard2"),
        ("Muon", "pp2:ZBVZeroBubble+tied"),
    ],
)
def test_a_layout_equals_one_process(
    ranks: RankPool, alone: Curves, tmp_path: Path, name: str, layout: str
) -> None:
    found = run(ranks, name, layout, tmp_path, save=False)
    expected = alone[name, parse(layout).kinds]
    for which in (0, 1):  # loss, gradient norm
        assert difference(found, expected, which) <= TOLERANCES["float64"]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("Muon", "shard4", "tp2xshard2"), ("Lion", "pp2", "tp2")],
)
def test_a_checkpoint_resumes_in_another_layout(
    ranks: RankPool,
    alone: Curves,
    tmp_path: Path,
    name: str,
    before: str,
    after: str,
) -> None:
    first = run(ranks, name, before, tmp_path, SAVED_AT)
    found = first + run(ranks, name, after, tmp_path)
    assert difference(found, alone[name, ()], 0) <= TOLERANCES["float64"]


@pytest.mark.parametrize("name", ["Lion", "Muon", "EightBit"])
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    unbroken = run(ranks, name, "shard2", tmp_path / "a")
    run(ranks, name, "shard2", tmp_path / "b", SAVED_AT)
    shutil.copytree(tmp_path / "b", tmp_path / "c", symlinks=True)
    assert run(ranks, name, "shard2", tmp_path / "b") == unbroken[SAVED_AT:]
    paths = [tmp_path / one / "checkpoint" / f"step_{STEPS}" for one in "ab"]
    with open_checkpoint(paths[0]) as a, open_checkpoint(paths[1]) as b:
        assert a.tensors.keys() == b.tensors.keys()
        for tensor in a.tensors:
            assert torch.equal(a.read(tensor), b.read(tensor)), tensor
        if name == "EightBit":  # saved as plain numbers, for any layout and any way of packing
            momentum = a.read("optimizer.model.layers.0.mlp.up_proj.weight.momentum")
            assert momentum.dtype == torch.float32
            assert a.read("optimizer.model.norm.weight.count") == STEPS
            assert len(run(ranks, name, "shard1", tmp_path / "c")) == STEPS - SAVED_AT


def refusal(world: World, config: JobConfig) -> str:
    try:
        curve(world, config)
    except Exception as error:
        return str(error)
    return ""


def test_state_of_another_optimizer_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    """Lion's average has the name of AdamW's, and is something else."""
    run(ranks, "AdamW", "shard1", tmp_path, SAVED_AT)
    path = tmp_path / "checkpoint" / f"step_{SAVED_AT}"
    lion = job("Lion", "shard1", tmp_path, STEPS, save=True)
    lion.checkpoint.resume = str(path)
    (said,) = ranks.run(1, refusal, lion)
    assert "optimizer.name" in said
    lion.checkpoint.skip_optimizer = True
    assert ranks.run(1, refusal, lion) == [""]
    # It is known after a way through another format, too.
    convert(path, tmp_path / "dcp", "dcp")
    convert(tmp_path / "dcp", tmp_path / "back", "overland")
    lion.checkpoint.skip_optimizer = False
    lion.checkpoint.resume = str(tmp_path / "back")
    (said,) = ranks.run(1, refusal, lion)
    assert "optimizer.name" in said
    adam = job("Adam", "shard1", tmp_path, STEPS, save=True)  # the same state, another function
    adam.checkpoint.resume = str(path)
    assert "optimizer.name" in ranks.run(1, refusal, adam)[0]
    adam.checkpoint.allow_changes = ["optimizer.name"]
    assert ranks.run(1, refusal, adam) == [""]
