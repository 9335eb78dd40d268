"""Rows that interact are refused where a batch is split, and nothing else is."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from overland.apps.check.fake_step import fake_steps
from overland.apps.proofs.layouts import parse
from overland.apps.proofs.pool import RankPool
from overland.config.schema import JobConfig
from overland.errors import ModelError, OverlandError
from overland.world import World
from tests.jobs import run_job, tiny_job


def refusals(world: World, configs: list[JobConfig]) -> list[str]:
    """What each run is refused with; empty if it trains."""
    importlib.import_module("tests.training.interacting")
    found = []
    for config in configs:
        try:
            run_job(world, config)
            found.append("")
        except OverlandError as error:
            found.append(str(error))
    return found


def job(folder: Path, kind: str, layout: str = "shard1", rows: int = 4, **more: Any) -> JobConfig:
    name = "features" if "compared" in kind else "interacting"
    model = {"name": name, "flavor": kind, "overrides": {}}
    if kind == "centered":
        model, more["objective"] = {}, "centered"
    training = {"steps": 1, "local_batch_size": rows, **more}
    parallelism = dict(parse(layout).parallelism)
    return tiny_job(folder, model=model, training=training, parallelism=parallelism)


INTERACT = ("contrastive", "mean", "batch norm", "centered", "mixed", "mixed after dropout",
            "mixed with noise", "inner", "once per pass")  # fmt: skip
SEPARATE = ("separate", "dropout", "counting", "frozen norm", "noise", "narrow sum")


@pytest.mark.parametrize("layout", ["shard1", "shard2"])
def test_rows_that_interact_are_refused_where_a_batch_is_split(
    ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    """On one rank, by two passes."""
    kinds = (*INTERACT, *SEPARATE) if layout == "shard1" else ("mixed", "mean", "dropout")
    jobs = [job(tmp_path / kind, kind, layout) for kind in kinds]
    for found in ranks.run(parse(layout).num_ranks, refusals, jobs):
        said = dict(zip(kinds, found, strict=True))
        assert "Network: other rows of a pass change" in said["mixed"]
        assert "Network: the loss of 2 rows is" in said["mean"]
        if layout == "shard2":
            assert not said["dropout"]
            continue
        assert "norm (BatchNorm1d) normalizes over the 4 rows" in said["batch norm"]
        assert "the objective Centered: other rows of a pass" in said["centered"]
        assert all(said[kind] for kind in INTERACT), said
        assert not any(said[kind] for kind in SEPARATE), said


def test_gradients_tell_in_bfloat16_too(ranks: RankPool, tmp_path: Path) -> None:
    narrow = {"dtype": "float32", "mixed_precision_param": "bfloat16",
              "mixed_precision_reduce": "float32"}  # fmt: skip
    kinds = ("mixed", "separate", "dropout")
    jobs = [job(tmp_path / kind, kind, **narrow) for kind in kinds]
    (found,) = ranks.run(1, refusals, jobs)
    assert [bool(one) for one in found] == [True, False, False], found


def test_features_that_are_compared_belong_to_one_row(ranks: RankPool, tmp_path: Path) -> None:
    """In one pass on each of two ranks, and in two passes on one."""
    kinds = ("compared", "compared, mixed")
    jobs = [job(tmp_path / kind, kind, "shard2") for kind in kinds]
    for found in ranks.run(2, refusals, jobs):
        assert not found[0]
        assert "other rows of a pass change" in found[1]
    kinds = (*kinds, "compared, without fields", "compared, narrow")
    (found,) = ranks.run(1, refusals, [job(tmp_path / kind, kind) for kind in kinds])
    assert not found[0]
    assert "other rows of a pass change" in found[1]
    assert "compare() was not given" in found[2]
    assert "forward() must take **fields" in found[3]


def test_one_row_per_rank_is_compared_with_itself(ranks: RankPool, tmp_path: Path) -> None:
    jobs = [
        job(tmp_path / kind, kind, "shard2", rows=1, global_batch_size=2)
        for kind in ("contrastive", "separate")
    ]
    for found in ranks.run(2, refusals, jobs):
        assert "the loss of 2 rows" in found[0]
        assert not found[1]


def test_a_batch_in_one_piece_trains(ranks: RankPool, tmp_path: Path) -> None:
    jobs = [job(tmp_path / kind, kind, rows=8) for kind in ("contrastive", "batch norm")]
    assert ranks.run(1, refusals, jobs) == [["", ""]]


def test_rows_of_a_pipelines_micro_batch_are_compared(ranks: RankPool, tmp_path: Path) -> None:
    rows = {"pipeline_parallel_microbatch_size": 2, **parse("pp2").parallelism}
    training = {"steps": 1, "objective": "centered"}
    config = tiny_job(tmp_path, training=training, parallelism=rows)
    for (found,) in ranks.run(2, refusals, [config]):
        assert "the objective Centered: other rows of a pass" in found


def test_check_finds_batch_norm_and_takes_a_step_of_compared_rows(tmp_path: Path) -> None:
    importlib.import_module("tests.training.interacting")
    with pytest.raises(ModelError, match="normalizes over the 4 rows of a pass, and a batch has 8"):
        fake_steps(job(tmp_path, "batch norm", "shard2"), world_size=2, device_type="cpu")
    assert fake_steps(job(tmp_path, "compared"), world_size=1, device_type="cpu")


@pytest.mark.parametrize(
    ("kind", "found"), [("per row", r"a tensor of shape \(4,\)"), ("tuple", "a tuple")]
)
def test_what_a_model_returns_is_a_sum(
    ranks: RankPool, tmp_path: Path, kind: str, found: str
) -> None:
    importlib.import_module("tests.training.interacting")
    config = job(tmp_path, kind)
    message = rf"forward\(\) of Network returned {found}, expected the sum of its loss"
    with pytest.raises(ModelError, match=message):
        fake_steps(config, world_size=1, device_type="cpu")
    ((said,),) = ranks.run(1, refusals, [config])
    assert "forward() of Network returned a t" in said
