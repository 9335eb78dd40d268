"""Frozen weights are not saved again: a checkpoint says where they are, and is complete with
them."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from overland.apps.convert import convert
from overland.apps.proofs.checkpoint import verify
from overland.apps.proofs.layouts import parse
from overland.apps.proofs.pool import RankPool
from overland.checkpoint.read import open_checkpoint
from overland.config.schema import JobConfig
from overland.errors import CheckpointError
from overland.models import build_model, resolve_config, transform
from overland.models.init import init_weights
from overland.world import World
from tests.jobs import TINY_MODEL, losses_and_norms, tiny_job
from tests.training.test_rehearsal import rehearsed

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
FROZEN = ["model.embed_tokens.*", "model.layers.0.*"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder of weights to start from."""
    model = build_model(resolve_config("llama3", "debug", overrides=TINY_MODEL))
    init_weights(model, seed=9)
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(dict(model.state_dict()), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_hf()))
    return folder


def curve(world: World, config: JobConfig, *modules: str) -> list[tuple[float, float]]:
    sys.path.insert(0, str(EXAMPLES))
    for module in modules:
        importlib.import_module(module)
    return losses_and_norms(world, config)


def job(folder: Path, base: Path, steps: int, layout: str = "shard1", **model: Any) -> JobConfig:
    given = parse(layout)
    rows = 8 // given.degrees.get("shard", 1)
    return tiny_job(
        folder,
        model=model or {"freeze": FROZEN},
        training={"steps": steps, "local_batch_size": rows},
        lr_scheduler={"total_steps": 4},
        parallelism=given.parallelism,
        checkpoint={"enable": True, "interval": 2, "initial_load_path": str(base)},
    )


@pytest.mark.parametrize(("before", "after"), [("shard1", "shard1"), ("shard2", "pp2")])
def test_a_run_resumes_with_frozen_weights_from_their_origin(
    ranks: RankPool, tmp_path: Path, base: Path, before: str, after: str
) -> None:
    def run(folder: str, steps: int, layout: str) -> list[tuple[float, float]]:
        config = job(tmp_path / folder, base, steps, layout)
        found: list[tuple[float, float]] = ranks.run(parse(layout).num_ranks, curve, config)[0]
        return found

    unbroken = run("a", 4, before)
    resumed = run("b", 2, before) + run("b", 4, after)
    for one, other in zip(resumed, unbroken, strict=True):
        assert one == pytest.approx(other, rel=1e-9 if before != after else 0, abs=0)
    with open_checkpoint(tmp_path / "b" / "checkpoint" / "step_4") as saved:
        names = {name.removeprefix("model.") for name in saved.tensors if "rng" not in name}
        left_out = saved.run["left_out"]
        assert left_out["folder"] == str(base)
        assert not names & set(left_out["names"])
        assert "model.layers.1.mlp.up_proj.weight" in names
        assert len(left_out["names"]) == 1 + 9
    assert verify(tmp_path / "b" / "checkpoint" / "step_4") == []


def test_an_export_is_whole_and_a_changed_origin_is_found(
    ranks: RankPool, tmp_path: Path, base: Path
) -> None:
    ranks.run(1, curve, job(tmp_path / "run", base, 2))
    convert(tmp_path / "run", tmp_path / "hf", to="hf")
    first, now = load_file(base / "model.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    assert first.keys() == now.keys()
    for name in first:
        is_frozen = name.startswith(("model.embed_tokens", "model.layers.0."))
        assert torch.equal(first[name].double(), now[name].double()) == is_frozen, name

    moved = tmp_path / "moved"
    base.rename(moved)
    with pytest.raises(CheckpointError, match=r"does not exist\. Restore them"):
        convert(tmp_path / "run", tmp_path / "hf2", to="hf")
    assert ranks.run(1, curve, job(tmp_path / "run", moved, 3))[0]  # it was told where they are
    shutil.copytree(moved, base)
    weights = load_file(base / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    step = tmp_path / "run" / "checkpoint" / "step_2"
    with pytest.raises(CheckpointError, match="has different contents"):
        convert(step, tmp_path / "hf3", to="hf")


def test_check_knows_what_a_checkpoint_leaves_out(
    ranks: RankPool, tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(steps: int, rank: int) -> JobConfig:
        return job(tmp_path / "run", base, steps, transforms={"low_rank": {"rank": rank}})

    ranks.run(1, curve, config(2, 2), "low_rank")
    monkeypatch.setattr(transform, "_TRANSFORMS", {})  # as before, after the test
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "low_rank", raising=False)
    importlib.import_module("low_rank")
    del sys.modules["low_rank"]  # others import it again
    assert rehearsed(config(4, 2)) == ""
    assert "model.transforms" in rehearsed(config(4, 3))
    base.rename(tmp_path / "moved")
    assert "frozen tensors that were loaded from" in rehearsed(config(4, 2))


def test_adapters_alone_are_saved(ranks: RankPool, tmp_path: Path, base: Path) -> None:
    model = {"transforms": {"low_rank": {"rank": 2}}}

    def config(folder: str, steps: int) -> JobConfig:
        return job(tmp_path / folder, base, steps, "shard2", **model)

    unbroken = ranks.run(2, curve, config("a", 4), "low_rank")
    resumed = ranks.run(2, curve, config("b", 2), "low_rank")
    resumed = [
        one + two
        for one, two in zip(resumed, ranks.run(2, curve, config("b", 4), "low_rank"), strict=True)
    ]
    assert resumed == unbroken
    with open_checkpoint(tmp_path / "b" / "checkpoint" / "step_4") as saved:
        weights = [name for name in saved.tensors if name.startswith("model.")]
        assert weights
        assert all(".up.weight" in name or ".down.weight" in name for name in weights)
