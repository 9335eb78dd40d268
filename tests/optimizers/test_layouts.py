"""An optimizer computes the same under every layout, and resumes in any of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from overland.checkpoint.read import open_checkpoint
from overland.cluster.pool import RankPool
from overland.cluster.world import World
from overland.config.schema import JobConfig
from overland.proofs.layout import TOLERANCES, Curve, curve, difference, proof_job
from overland.proofs.layouts import parse
from tests.optimizers import own  # noqa: F401  registers them on every rank

SAVED_AT, STEPS = 2, 5


def job(name: str, layout: str | None, folder: Path, steps: int = STEPS) -> JobConfig:
    parsed = parse(layout) if layout else None
    settings = {
        "optimizer": {"name": name},
        "lr_scheduler": {"total_steps": STEPS},
        "checkpoint": {"enable": True, "interval": SAVED_AT},
    }
    kinds = parsed.kinds if parsed else ("tied",)
    return proof_job(parsed, kinds, "float64", steps, folder, settings)


def trained(world: World, config: JobConfig) -> Curve:
    return curve(world, config)


def run(pool: RankPool, name: str, layout: str, folder: Path, steps: int = STEPS) -> Curve:
    return pool.run(parse(layout).num_ranks, trained, job(name, layout, folder, steps))[0]


@pytest.fixture(scope="module")
def alone(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Curve]:
    """One process that never stops, without tied embeddings and with."""
    found = {}
    for name in ("Lion", "Muon"):
        for kind in ("", "+tied"):
            folder = tmp_path_factory.mktemp("alone")
            found[name, kind] = run(ranks, name, f"shard1{kind}", folder)
    return found


@pytest.mark.parametrize(
    "layout",
    ["shard2", "shard4", "tp2", "pp2", "tp2xshard2", "rep2xshard2", "pp2:ZBVZeroBubble+tied"],
)
@pytest.mark.parametrize("name", ["Lion", "Muon"])
def test_a_layout_equals_one_process(
    ranks: RankPool, alone: dict[tuple[str, str], Curve], tmp_path: Path, name: str, layout: str
) -> None:
    found = run(ranks, name, layout, tmp_path)
    kind = "+tied" if layout.endswith("+tied") else ""
    assert difference(found, alone[name, kind], 0) <= TOLERANCES["float64"]  # loss
    assert difference(found, alone[name, kind], 1) <= TOLERANCES["float64"]  # gradient norm


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("Lion", "shard4", "tp2"), ("Muon", "shard4", "tp2xshard2"), ("Muon", "pp2", "shard1")],
)
def test_a_checkpoint_resumes_in_another_layout(
    ranks: RankPool,
    alone: dict[tuple[str, str], Curve],
    tmp_path: Path,
    name: str,
    before: str,
    after: str,
) -> None:
    first = run(ranks, name, before, tmp_path, SAVED_AT)
    found = first + run(ranks, name, after, tmp_path)
    assert difference(found, alone[name, ""], 0) <= TOLERANCES["float64"]


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
            path = tmp_path / "c"
            assert len(run(ranks, name, "shard4", path)) == STEPS - SAVED_AT


def refusal(world: World, config: JobConfig) -> str:
    try:
        curve(world, config)
    except Exception as error:
        return str(error)
    return ""


def test_state_of_another_optimizer_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    """Lion's average has the name of AdamW's, and is something else."""
    ranks.run(1, trained, job("AdamW", "shard1", tmp_path, SAVED_AT))
    path = tmp_path / "checkpoint" / f"step_{SAVED_AT}"
    lion = job("Lion", "shard1", tmp_path)
    lion.checkpoint.resume = str(path)
    (said,) = ranks.run(1, refusal, lion)
    assert "was trained with AdamW, and this run with Lion" in said
    lion.checkpoint.skip_optimizer = True
    assert ranks.run(1, refusal, lion) == [""]
    adam = job("Adam", "shard1", tmp_path)
    assert ranks.run(1, refusal, adam) == [""]
