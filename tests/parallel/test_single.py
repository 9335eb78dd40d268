"""One device: no sharding, and split float32 master weights that train and load like whole ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from overland.apps.proofs.job import proof_job
from overland.apps.proofs.layout import Curve, curve, difference
from overland.apps.proofs.layouts import parse
from overland.apps.proofs.pool import RankPool
from overland.config import derived, schema
from overland.config.schema import JobConfig
from overland.optimizers.optimizer import Optimizer
from overland.parallel import sharding
from overland.parallel.master_weights import MasterWeights
from overland.world import World


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


def test_whole_inside_and_split_again_outside() -> None:
    network = model()
    exact = [p.detach().clone() for p in network.parameters()]
    masters = MasterWeights([network])
    masters.split()
    assert {p.dtype for p in network.parameters()} == {torch.bfloat16}
    with masters.whole():
        for parameter, expected in zip(network.parameters(), exact, strict=True):
            assert torch.equal(parameter, expected)
            parameter.data.add_(1e-5)  # as loading a checkpoint does
    with masters.whole():
        for parameter, expected in zip(network.parameters(), exact, strict=True):
            assert torch.equal(parameter, expected + 1e-5)


def test_gradients_of_several_passes_add_up_in_float32() -> None:
    network = model()
    masters = MasterWeights([network])
    masters.split(gradient_dtype=torch.float32)
    with masters.whole():
        pass
    for _ in range(3):
        network(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    gradients = [p.grad for p in network.parameters()]
    assert {g.dtype for g in gradients if g is not None} == {torch.float32}


def test_small_updates_are_not_lost() -> None:
    """A rate far below bfloat16's resolution still moves the master."""
    network = model()
    optimizer = Optimizer([network], schema.Optimizer(lr=1e-6, weight_decay=0.0))
    before = next(network.parameters()).detach().clone()
    optimizer.split()
    one, zero = torch.ones(()), torch.zeros(())
    for _ in range(10):
        for parameter in network.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.update(1e-6, one, 0.0, one, skip=zero)
    with optimizer.whole():
        moved = before - next(network.parameters())
        assert 0.5e-5 < moved.mean() < 1.5e-5


def curves_with_and_without_fsdp(world: World, config: JobConfig) -> tuple[Curve, Curve]:
    alone = curve(world, config)
    with pytest.MonkeyPatch.context() as patch:
        for module in (derived, sharding):
            patch.setattr(module, "HALVES", ("", ""))
        return alone, curve(world, config)


@pytest.mark.parametrize("rows_per_pass", [8, 2])
def test_one_device_in_halves_computes_what_fsdp_computes(
    ranks: RankPool, tmp_path: Path, rows_per_pass: int
) -> None:
    """Also with several passes per step, whose gradients are added up in float32."""
    job = proof_job(parse("shard1"), "bfloat16", 10, tmp_path)
    job.training.local_batch_size = rows_per_pass
    alone, sharded = ranks.run(1, curves_with_and_without_fsdp, job)[0]
    assert alone[:2] == sharded[:2]
    # Ties are rounded differently, which concerns one weight in 65536; then rounding grows.
    for which, bound in ((0, 1e-4), (1, 1e-3)):  # loss, gradient norm
        assert difference(alone[:4], sharded[:4], which) < bound
    assert difference(alone, sharded, 0) < 1e-3
