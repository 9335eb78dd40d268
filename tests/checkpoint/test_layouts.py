"""A checkpoint of one layout resumes in another as if nothing had happened."""

from pathlib import Path

import pytest
import torch

from overland.apps.proofs.job import proof_job
from overland.apps.proofs.layout import curve, difference
from overland.apps.proofs.layouts import parse
from overland.apps.proofs.pool import RankPool
from overland.config.schema import JobConfig
from overland.parallel.sharding import named_parameters, shard_of
from overland.training.build import build_run
from overland.training.loop import train
from overland.world import World


def job(folder: Path, layout: str, steps: int, tied: bool) -> JobConfig:
    config = proof_job(parse(layout + "+tied" * tied), "float64", steps, folder)
    save = config.checkpoint.model_copy(update={"enable": True})
    schedule = config.lr_scheduler.model_copy(update={"total_steps": 6})
    return config.model_copy(update={"checkpoint": save, "lr_scheduler": schedule})


@pytest.mark.parametrize(
    ("before", "after", "tied"),
    [
        ("shard2", "tp2", False),
        ("tp2xshard2", "pp2:1F1B", True),
        ("pp2:ZBVZeroBubble", "rep2", False),
        ("cp2", "pp2:ZBVZeroBubble", True),
        pytest.param("pp2xtp2", "cp2", True, marks=pytest.mark.long),
        pytest.param("pp2xcp2", "pp2:Interleaved1F1B", True, marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_in_another_layout(
    ranks: RankPool, tmp_path: Path, before: str, after: str, tied: bool
) -> None:
    unbroken = ranks.run(1, curve, job(tmp_path / "unbroken", "shard1", 6, tied))[0]
    ranks.run(parse(before).num_ranks, curve, job(tmp_path / "broken", before, 3, tied))
    rest = ranks.run(parse(after).num_ranks, curve, job(tmp_path / "broken", after, 6, tied))
    for curve_of_rank in rest:
        assert difference(curve_of_rank, unbroken[3:], 0) < 1e-9
        assert difference(curve_of_rank, unbroken[3:], 1) < 1e-9


def test_both_ends_of_a_tied_pipeline_are_rounded_alike(ranks: RankPool, tmp_path: Path) -> None:
    """Moments are rounded stochastically; a checkpoint keeps one of the two ends."""
    narrow = {"optimizer": {"bf16_moments": True}}
    config = proof_job(parse("pp2:1F1B+tied"), "float32", 6, tmp_path, narrow)
    first, last = ranks.run(2, tied_matrix, config)
    assert torch.equal(first, last)


def tied_matrix(world: World, config: JobConfig) -> torch.Tensor:
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    train(run)
    matrix = named_parameters(run.model.parts)["model.embed_tokens.weight"]
    return shard_of(matrix.detach()).clone()
