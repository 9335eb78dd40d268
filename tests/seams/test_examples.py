"""The examples of docs/examples, each a user's own module: they compute the same in every layout,
and no file of the package knows of them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from overland.apps.proofs.layouts import parse
from overland.apps.proofs.pool import RankPool
from overland.config.schema import JobConfig
from overland.errors import ModelError
from overland.world import World
from tests.jobs import run_job, tiny_job

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
LONGEST = 120


def records(world: World, config: JobConfig, *modules: str) -> list[dict[str, Any]]:
    """What a run with a user's modules logs, without what depends on the clock."""
    sys.path.insert(0, str(EXAMPLES))
    for module in modules:
        importlib.import_module(module)
    recorder = run_job(world, config)
    logged = recorder.records + recorder.validations
    timed = ("tokens_per_second", "samples_per_second", "tflops", "mfu", "memory_gib", "data_wait")
    return [{key: one[key] for key in one if key not in timed} for one in logged]


def job(folder: Path, name: str, **sections: Any) -> JobConfig:
    """A job in a layout of the proofs; `accumulate` takes two passes per step."""
    layout = parse(name.removesuffix(":accumulate"))
    passes = 2 if name.endswith(":accumulate") else 1
    rows = 8 // layout.degrees.get("shard", 1) // passes
    training = {"steps": 4, "local_batch_size": rows, **sections.pop("training", {})}
    parallelism = {**layout.parallelism, **sections.pop("parallelism", {})}
    return tiny_job(folder / name, training=training, parallelism=parallelism, **sections)


def assert_equal(found: list[dict[str, Any]], alone: list[dict[str, Any]], name: str) -> None:
    assert len(found) == len(alone)
    for one, other in zip(found, alone, strict=True):
        assert one.keys() == other.keys()
        for key in other:
            assert abs(one[key] - other[key]) <= 1e-9 * max(1.0, abs(other[key])), (name, key)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_are_short_and_shown_in_the_docs(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST
    assert text in (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def test_experts_with_a_balance_loss_and_a_bias(ranks: RankPool, tmp_path: Path) -> None:
    model = {"name": "experts", "flavor": "tiny", "overrides": {}}
    (alone,) = ranks.run(1, records, job(tmp_path, "shard1", model=model), "experts")
    assert alone[0]["balance_loss"] > 4 * 0.9  # four blocks, each at least 1 when in balance
    for name in ("shard2:accumulate", "pp2:ZBVZeroBubble"):
        layout = parse(name.removesuffix(":accumulate"))
        config = job(tmp_path, name, model=model)
        for found in ranks.run(layout.num_ranks, records, config, "experts"):
            assert_equal(found, alone, name)
    # Blocks that are computed twice count once.
    recompute = {"activation_checkpoint": {"mode": "full"}}
    for found in ranks.run(
        2, records, job(tmp_path, "shard2", model=model, **recompute), "experts"
    ):
        assert_equal(found, alone, "recompute")


LOW_RANK = {"transforms": {"low_rank": {"rank": 3, "scale": 2.0}}}


def test_a_low_rank_transform_with_its_base_frozen(ranks: RankPool, tmp_path: Path) -> None:
    (alone,) = ranks.run(1, records, job(tmp_path, "shard1", model=LOW_RANK), "low_rank")
    (plain,) = ranks.run(1, records, job(tmp_path, "shard1"))
    assert alone[0]["loss"] == plain[0]["loss"]  # it starts as the model itself
    assert alone[-1]["loss"] != plain[-1]["loss"]
    for name in ("tp2", "pp2", "cp2"):
        layout = parse(name)
        for found in ranks.run(
            layout.num_ranks, records, job(tmp_path, name, model=LOW_RANK), "low_rank"
        ):
            assert_equal(found, alone, name)


def test_a_preference_over_pairs_in_two_passes(ranks: RankPool, tmp_path: Path) -> None:
    sections = {
        "model": LOW_RANK,
        "training": {"objective": "preference", "objective_options": {"beta": 0.5}},
        "optimizer": {"lr": 3e-2},
    }
    modules = ("low_rank", "preference")
    (alone,) = ranks.run(1, records, job(tmp_path, "shard1", **sections), *modules)
    assert alone[-1]["margin"] > alone[0]["margin"] == 0
    assert {"accuracy", "margin"} <= alone[0].keys()
    for name in ("pp2", "cp2", "shard1:accumulate"):
        layout = parse(name.removesuffix(":accumulate"))
        pairs = {"pipeline_parallel_microbatch_size": 2} if name == "pp2" else {}
        config = job(tmp_path, name, parallelism=pairs, **sections)
        for found in ranks.run(layout.num_ranks, records, config, *modules):
            assert_equal(found, alone, name)


def test_z_loss_is_the_same_in_every_layout(ranks: RankPool, tmp_path: Path) -> None:
    sections = {"training": {"z_loss": 1e-2}}
    (alone,) = ranks.run(1, records, job(tmp_path, "shard1", **sections))
    first = alone[0]
    assert first["z_loss"] > 0
    assert abs(first["loss"] - first["cross_entropy"] - first["z_loss"]) < 1e-12
    for name in ("tp2", "cp2", "shard1:accumulate"):
        layout = parse(name.removesuffix(":accumulate"))
        config = job(tmp_path, name, **{key: dict(value) for key, value in sections.items()})
        for found in ranks.run(layout.num_ranks, records, config):
            assert_equal(found, alone, name)


def contrastive(folder: Path, name: str, data: Path, **sections: Any) -> JobConfig:
    model = {"name": "clip", "flavor": "tiny", "overrides": {}}
    data_section = {"folder": str(data), "tokenise_processes": 0}
    training = {"dataset": "captions", **sections.pop("training", {})}
    return job(folder, name, model=model, data=data_section, training=training, **sections)


def test_rows_compared_over_the_whole_batch(ranks: RankPool, tmp_path: Path) -> None:
    """The same on one rank, on several, and in several passes."""
    held = {"enable": True, "dataset": "captions", "freq": 4, "steps": 1,
            "allow_training_data": True}  # fmt: skip
    args = {"data": tmp_path / "data", "validation": held}
    (alone,) = ranks.run(1, records, contrastive(tmp_path, "shard1", **args), "clip")
    assert alone[3]["loss"] < alone[0]["loss"]
    assert {"accuracy", "validation_loss"} <= {key for one in alone for key in one}
    for name in ("shard1:accumulate", "shard2:accumulate"):
        config = contrastive(tmp_path, name, **args)
        for found in ranks.run(parse(name.removesuffix(":accumulate")).num_ranks, records, config,
                               "clip"):  # fmt: skip
            assert len(found) == len(alone)
            for one, other in zip(found, alone, strict=True):
                assert one == pytest.approx(other, rel=1e-12), name


def test_a_loss_per_token(ranks: RankPool, tmp_path: Path) -> None:
    focal = {"training": {"objective": "focal", "objective_options": {"gamma": 1.0}}}
    (alone,) = ranks.run(1, records, job(tmp_path, "shard1", **focal), "focal")
    for name in ("cp2", "shard1:accumulate"):
        config = job(tmp_path, name, **{key: dict(value) for key, value in focal.items()})
        for found in ranks.run(parse(name.removesuffix(":accumulate")).num_ranks, records, config,
                               "focal"):  # fmt: skip
            assert_equal(found, alone, name)


def refusal(world: World, config: JobConfig, *modules: str) -> str:
    try:
        records(world, config, *modules)
    except ModelError as error:
        return str(error)
    return ""


def test_a_plan_for_a_decoder_with_its_own_mlp(ranks: RankPool, tmp_path: Path) -> None:
    model = {"name": "squared", "flavor": "tiny", "overrides": {}}
    (alone,) = ranks.run(1, records, job(tmp_path, "shard1", model=model), "plan")
    for found in ranks.run(2, records, job(tmp_path, "cp2", model=model), "plan"):
        assert_equal(found, alone, "cp2")
    for said in ranks.run(2, refusal, job(tmp_path, "tp2", model=model), "plan"):
        assert "no plan for tp = 2" in said
