"""Accumulation, batch split and padding never change the loss, a mean over the global batch."""

from pathlib import Path

import pytest
import torch

from overland.apps.proofs.pool import RankPool
from overland.config.schema import JobConfig
from overland.data.batch import Batch
from overland.models.inner import InnerLoss
from overland.training.build import build_run
from overland.training.step import train_step
from overland.world import World
from tests.jobs import losses_and_norms, tiny_job

TOLERANCE = 1e-13


def documents(data_folder: Path) -> dict[str, dict[str, object]]:
    """Real text with document masks: rows differ in how many labels count."""
    return {
        "data": {"folder": str(data_folder), "vocab_size": 512, "document_mask": True},
        "training": {"dataset": "stdlib"},
    }


@pytest.mark.parametrize(("num_ranks", "local_batch_size"), [(1, 2), (2, 1), (4, 2)])
def test_accumulation_and_split_do_not_change_losses_or_gradients(
    ranks: RankPool, tmp_path: Path, data_folder: Path, num_ranks: int, local_batch_size: int
) -> None:
    sections = documents(data_folder)
    whole = tiny_job(tmp_path / "whole", **sections)
    sections["training"] = {**sections["training"], "local_batch_size": local_batch_size}
    parts = tiny_job(tmp_path / "parts", **sections)

    expected = ranks.run(1, losses_and_norms, whole)[0]
    for got in ranks.run(num_ranks, losses_and_norms, parts):
        assert got == [pytest.approx(pair, rel=TOLERANCE) for pair in expected]


@pytest.mark.parametrize("stage", ["zero0", "zero3"])
def test_sharding_stage_does_not_change_losses(ranks: RankPool, tmp_path: Path, stage: str) -> None:
    whole = tiny_job(tmp_path / "whole")
    split = tiny_job(
        tmp_path / "split",
        training={"local_batch_size": 2},
        parallelism={"sharding_stage": stage},
    )
    expected = ranks.run(1, losses_and_norms, whole)[0]
    got = ranks.run(2, losses_and_norms, split)[0]
    assert got == [pytest.approx(pair, rel=TOLERANCE) for pair in expected]


def test_tied_embeddings_train_alike_on_one_and_two_ranks(ranks: RankPool, tmp_path: Path) -> None:
    tied = {"overrides": {**tiny_job(tmp_path).model.overrides, "tie_word_embeddings": True}}
    whole = tiny_job(tmp_path / "whole", model=tied)
    split = tiny_job(tmp_path / "split", model=tied, training={"local_batch_size": 4})
    expected = ranks.run(1, losses_and_norms, whole)[0]
    got = ranks.run(2, losses_and_norms, split)[0]
    assert got == [pytest.approx(pair, rel=TOLERANCE) for pair in expected]
    assert expected[-1][0] != expected[0][0]


def scales(world: World, config: JobConfig) -> tuple[float, float]:
    """What a step multiplies its summed loss by, and what the losses inside the model."""
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    ids = torch.arange(3 * 5).view(3, 5)
    loss = InnerLoss("balance", 1.0).double()
    run.inner._losses.append(loss)
    seen: list[float] = []
    whole = run.model.loss_and_gradients

    def noted(batch: Batch, scale: torch.Tensor) -> torch.Tensor:
        seen.append(scale.item())
        return whole(batch, scale)

    run.model.loss_and_gradients = noted  # type: ignore[method-assign]
    train_step(run, Batch({"tokens_BS": ids, "labels_BS": ids}))
    return seen[0], loss.scale.item()


def test_what_the_loss_is_divided_by_is_not_rounded_to_float32(
    ranks: RankPool, tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, training={"local_batch_size": 3, "global_batch_size": 3})
    assert ranks.run(1, scales, job) == [(1 / 15, 1 / 3)]
