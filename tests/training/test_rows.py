"""Rows that interact are refused where a batch is split, and nothing else is."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from overland.config.schema import JobConfig
from overland.errors import OverlandError
from overland.tools.proofs.layouts import parse
from overland.tools.proofs.pool import RankPool
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
    model = {"name": "interacting", "flavor": kind, "overrides": {}}
    if kind == "centered":
        model, more["objective"] = {}, "centered"
    training = {"steps": 1, "local_batch_size": rows, **more}
    parallelism = dict(parse(layout).parallelism)
    return tiny_job(folder, model=model, training=training, parallelism=parallelism)


KINDS = ("contrastive", "mean", "batch norm", "centered", "separate", "dropout", "counting")


@pytest.mark.parametrize("layout", ["shard1", "shard2"])
def test_rows_that_interact_are_refused_where_a_batch_is_split(
    ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    """On one rank, by two passes."""
    jobs = [job(tmp_path / kind, kind, layout) for kind in KINDS]
    for found in ranks.run(parse(layout).num_ranks, refusals, jobs):
        said = dict(zip(KINDS, found, strict=True))
        assert "Network: the loss of 4 rows is" in said["contrastive"]
        assert "Network: the loss of 4 rows is" in said["mean"]
        assert "norm (BatchNorm1d) normalizes over the rows" in said["batch norm"]
        assert "the objective Centered: the loss of 4 rows" in said["centered"]
        assert not any(said[kind] for kind in ("separate", "dropout", "counting")), said


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
        assert "the objective Centered: the loss of 2 rows" in found
