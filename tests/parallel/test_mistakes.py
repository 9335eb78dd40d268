"""The proof of layouts detects mistakes: wrong code is patched into the ranks of a layout, and its
numbers must differ from those of one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from overland.apps.proofs.job import TINY, held_out_data, proof_job
from overland.apps.proofs.layout import prove_layouts
from overland.apps.proofs.layouts import ROWS, SHORT, parse
from overland.apps.proofs.pool import RankPool
from overland.data.batch import Batch, load_batch
from overland.data.corpora import Preparer
from overland.data.lanes import IGNORED
from overland.data.prepare import Dataset, validation_data
from overland.optimizers.optimizer import Optimizer
from overland.parallel import tensor
from overland.parallel.comm import sum_over
from overland.parallel.pipeline import Pipeline
from overland.parallel.whole import Whole
from overland.training import loop, step, validate
from overland.training.run import Run
from overland.world import World

Patch = AbstractContextManager[object]


def mean_of_rank_means() -> Patch:
    """Each rank divides by the number of its own tokens."""
    right = sum_over

    def wrong(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        is_count = tensor.dtype == torch.int64
        return tensor * group.size() if is_count else right(tensor, group)

    return patch.object(step, "sum_over", wrong)


def mean_of_accumulated_means() -> Patch:
    """Each accumulated pass counts alike, however many tokens it has."""
    right_loss, right = Whole.loss, Whole.loss_and_gradients

    def wrong(self: Whole, batch: Batch, scale: Tensor) -> Tensor:
        even = num_valid(batch) / len(list(batch.split(self.rows_per_pass)))
        loss = lambda self, micro: right_loss(self, micro) * even / num_valid(micro)
        with patch.object(Whole, "loss", loss):
            return right(self, batch, scale)

    return patch.object(Whole, "loss_and_gradients", wrong)


def gradients_not_reduced() -> Patch:
    """Each rank takes its shard of its own gradients."""

    def wrong(
        self: object,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        **_: object,
    ) -> None:
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])

    return patch.object(DefaultReduceScatter, "__call__", wrong)


def tied_matrix_counted_twice() -> Patch:
    return patch.object(Pipeline, "counted_once", lambda self, parameter: True)


def rows_of_the_first_rank() -> Patch:
    """Every rank reads the first one's share of a batch."""
    right = loop.batches
    wrong = lambda rows, start, part, *of: right(rows, start, 0, *of)
    return patch.object(loop, "batches", wrong)


def mean_of_validated_means() -> Patch:
    """Each rank's mean on held-out data counts alike."""
    right = validate.loss_on

    def wrong(run: Run, held_out: Dataset) -> float:
        with (
            patch.object(validate, "total_sums", lambda sums, mesh: sums),
            patch.object(validate, "sum_over", lambda count, group: count),
        ):
            mean = torch.tensor(right(run, held_out), dtype=torch.float64)
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    return patch.object(validate, "loss_on", wrong)


def last_chunk_only() -> Patch:
    """Of the output matrix's gradient, only what the last chunk of tokens gives survives."""
    right = tensor.add_product

    def wrong(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        return right(None, a, b, dtype)

    return patch.object(tensor, "add_product", wrong)


def not_clipped() -> Patch:
    right = Optimizer.update

    def wrong(self: Optimizer, rate: Any, norm: Tensor, *more: Any) -> None:
        right(self, rate, norm * 1e-6, *more)

    return patch.object(Optimizer, "update", wrong)


def num_valid(batch: Batch) -> Tensor:
    return (batch["labels_BS"] != IGNORED).sum()


class MistakenPool(RankPool):
    """Ranks of another pool that make a mistake; one rank alone makes none."""

    def __init__(self, pool: RankPool, mistake: Callable[[], Patch]) -> None:
        self.pool, self.mistake, self.device_type = pool, mistake, pool.device_type

    def run(
        self, num_ranks: int, function: Callable[..., Any], *args: Any, num_nodes: int = 1
    ) -> list[Any]:
        if num_ranks > 1:
            function, args = run_mistaken, (self.mistake, function, *args)
        return self.pool.run(num_ranks, function, *args, num_nodes=num_nodes)


def run_mistaken(world: World, mistake: Any, function: Any, *args: Any) -> Any:
    with mistake():
        return function(world, *args)


@pytest.mark.parametrize(
    ("mistake", "layout", "shows_in"),
    [
        (mean_of_rank_means, "shard2:zero3+documents", "loss"),
        (mean_of_accumulated_means, "shard4:accumulate+documents", "loss"),
        (gradients_not_reduced, "shard2:zero3", "norm"),
        (tied_matrix_counted_twice, "pp2:1F1B+tied", "norm"),
        (rows_of_the_first_rank, "shard2:zero3", "loss"),
        (mean_of_validated_means, "shard2:zero3", "validation"),
        (last_chunk_only, "tp2+layernorm", "norm"),
        (not_clipped, "shard2:zero3", "norm"),
    ],
)
def test_the_proof_finds_a_mistake(
    ranks: RankPool,
    mistake: Callable[[], Patch],
    layout: str,
    shows_in: str,
) -> None:
    assert layout in {one.name for one in SHORT}
    (verdict,) = prove_layouts([parse(layout)], MistakenPool(ranks, mistake), steps=3)
    assert not verdict.is_equal
    assert not verdict.error  # it ran, and its numbers are wrong
    assert getattr(verdict, f"{shows_in}_difference") > 1e-5, verdict


def test_held_out_rows_have_different_numbers_of_tokens(tmp_path: Path) -> None:
    job = proof_job(
        parse("shard1"), "float64", 1, tmp_path, {"validation": held_out_data(tmp_path)}
    )
    (dataset,) = validation_data(job, ROWS, TINY["vocab_size"], Preparer())
    batches = [load_batch(dataset.rows, number) for number in range(2)]
    counts = [(row != IGNORED).sum().item() for batch in batches for row in batch["labels_BS"]]
    assert len(set(counts)) >= 3, counts  # full ones, one that is not, and empty ones
