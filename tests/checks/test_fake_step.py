"""A step of one rank of a large world, on this machine, without memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from overland.apps.check.fake_step import KEPT, fake_steps
from overland.apps.check.planned import PlannedRun
from overland.apps.proofs.job import proof_job
from overland.apps.proofs.layouts import parse
from overland.apps.proofs.pool import RankPool
from overland.config.load import load_config
from overland.config.schema import JobConfig
from overland.data import registry as sources
from overland.data.batch import load_batch
from overland.errors import ObjectiveError, OptimizerError
from overland.models.flops import count_parameters
from overland.models.registry import model_config
from overland.objectives import registry as objectives
from overland.objectives.objective import Objective
from overland.optimizers import WholeMatrix
from overland.optimizers import registry as optimizers
from overland.parallel.sharding import shard_of
from overland.training.build import build_run
from overland.training.step import train_step
from overland.world import World


def steps(world_size: int, *settings: str):
    config = load_config("llama3_debug", settings, env={}).config
    return config, fake_steps(config, world_size)


def test_shards_are_a_fair_share_of_the_model() -> None:
    config, (step,) = steps(64, "parallelism.tensor_parallel_degree=4")
    whole = count_parameters(model_config(config.model)).total
    assert step.parameters == pytest.approx(whole / 64, rel=0.02)
    assert step.num_bytes["parameters"] == step.num_bytes["gradients"] == 4 * step.parameters
    assert step.num_bytes["optimizer"] == 8 * step.parameters
    assert step.collectives["all-gather"] > 0


def test_a_pipeline_is_checked_at_both_ends() -> None:
    _, (first, last) = steps(
        32, "parallelism.pipeline_parallel_degree=2", "parallelism.context_parallel_degree=2"
    )
    assert (first.rank, last.rank) == (0, 16)
    assert first.num_bytes[KEPT] > 0
    assert last.num_bytes[KEPT] > 0


def test_every_combination_of_axes_is_checked_in_one_process() -> None:
    """A pipeline is checked in several worlds, one after the other; none may take over what DTensor
    remembers of the one before."""
    tiny = ["model.overrides.num_hidden_layers=2", "training.seq_len=64"]
    pp = 2
    for tp, cp, dp in (1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 1):
        degrees = {"pipeline": pp, "tensor": tp, "context": cp}
        settings = [f"parallelism.{axis}_parallel_degree={n}" for axis, n in degrees.items()]
        _, found = steps(pp * tp * cp * dp, *settings, *tiny)
        assert all(step.num_bytes[KEPT] > 0 for step in found), (pp, tp, cp, dp)


def test_gpipe_keeps_every_micro_batch_and_1f1b_as_many_as_stages() -> None:
    pp = ["parallelism.pipeline_parallel_degree=2", "training.local_batch_size=16"]
    pp += ["model.overrides.num_hidden_layers=4", "training.seq_len=64"]
    _, gpipe = steps(2, *pp, "parallelism.pipeline_parallel_schedule=GPipe")
    _, one = steps(2, *pp, "parallelism.pipeline_parallel_schedule=1F1B")
    for wide, narrow, under_way in zip(gpipe, one, (2, 1), strict=True):
        (each,) = wide.microbatch_bytes
        assert wide.num_bytes[KEPT] - narrow.num_bytes[KEPT] == (16 - under_way) * each


class Live:
    """Bytes of saved tensors that are alive, each storage once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.holders: Counter[int] = Counter()

    def pack(self, tensor: Tensor) -> Held:
        return Held(self, tensor)

    def unpack(self, held: Held) -> Tensor:
        return held.tensor


class Held:
    def __init__(self, live: Live, tensor: Tensor) -> None:
        plain = shard_of(tensor)
        self.live, self.key = live, plain.untyped_storage()._cdata
        # An operation's output comes with the operation's node, which holds what is packed here:
        # kept as it is, it would keep itself.
        self.tensor = tensor.detach()
        self.size = plain.numel() * plain.element_size()
        live.now += 0 if live.holders[self.key] else self.size
        live.holders[self.key] += 1
        live.most = max(live.most, live.now)

    def __del__(self) -> None:
        self.live.holders[self.key] -= 1
        self.live.now -= 0 if self.live.holders[self.key] else self.size


def most_saved(world: World, config: JobConfig) -> int:
    """Bytes that this rank keeps at most in a real step."""
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    batch = load_batch(run.dataset.rows, 0, run.mesh.dp_rank, run.mesh.dp_size)
    live = Live()
    with saved_tensors_hooks(live.pack, live.unpack):
        train_step(run, batch)
    return live.most


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_kept_bytes_are_those_of_real_stages(
    ranks: RankPool, tmp_path: Path, schedule: str
) -> None:
    config = proof_job(parse(f"pp2:{schedule}"), "float64", 1, tmp_path)
    counted = [step.num_bytes[KEPT] for step in fake_steps(config, 2)]
    assert counted == pytest.approx(ranks.run(2, most_saved, config), rel=0.01)


def test_recompute_keeps_less_for_the_backward_pass() -> None:
    kept = [
        steps(8, f"activation_checkpoint.mode={mode}")[1][0].num_bytes[KEPT]
        for mode in ("full", "selective", "none")
    ]
    assert kept == sorted(kept)
    assert kept[0] < kept[2] / 2


SMALL = [
    "model.overrides={num_hidden_layers = 1, hidden_size = 32, num_attention_heads = 2}",
    "training.seq_len=32",
]


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_rule_of_a_users_own_is_tried(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    @dataclass(frozen=True)
    class Turned(WholeMatrix):
        def whole(self, matrix: Tensor) -> Tensor:
            return matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T

        def after(self, parameter, direction, state, rates):
            return parameter - rates.lr * direction, state

    monkeypatch.setitem(optimizers._RULES, "Turned", Turned)
    with pytest.raises(OptimizerError, match=r"Turned.whole\(\) was given .* and returned"):
        steps(world_size, "optimizer.name=Turned", *SMALL)
    monkeypatch.setattr(Turned, "whole", lambda self, matrix: matrix)
    steps(world_size, "optimizer.name=Turned", *SMALL)


def test_an_objective_finds_the_channels_of_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scored:
        kind = "tokens"
        channels: ClassVar = {"score": "float32"}

        def chunks(self) -> list[str]:
            return ["all"]

        def read(self, chunk: str) -> list[dict[str, list[float]]]:
            return [{"tokens": [1, 2, 3], "score": [0.0, 1.0, 0.5]}]

    class ByScore(Objective):
        def terms(self, losses_BS, fields):
            return (losses_BS * fields["score_BS"]).sum(1, keepdim=True)

    monkeypatch.setitem(sources._sources, "scored", Scored)
    monkeypatch.setitem(objectives._OBJECTIVES, "by_score", ByScore)
    steps(1, "training.objective=by_score", "training.dataset=scored", *SMALL)
    with pytest.raises(ObjectiveError, match="needs the field score_BS"):
        steps(1, "training.objective=by_score", "training.dataset=random", *SMALL)


def test_a_count_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows(Objective):
        def count(self, batch):
            return len(batch)

    monkeypatch.setitem(objectives._OBJECTIVES, "rows", Rows)
    with pytest.raises(ObjectiveError, match=r"Rows.count\(\) returned int"):
        steps(1, "training.objective=rows", *SMALL)


def test_a_hybrid_stage_is_described_as_it_is_stepped() -> None:
    config = JobConfig().having({"parallelism.sharding_stage": "zero3_hybrid"})
    planned = PlannedRun(config, 16)
    assert (planned.degrees.dp_replicate, planned.degrees.dp_shard) == (2, 8)
    assert planned.lines("16")["devices"] == "16, 8 per node"
