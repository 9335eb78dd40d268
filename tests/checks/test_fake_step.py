"""A step of one rank of a large world, on this machine, without memory."""

import itertools

import pytest

from overland.checks.fake_step import fake_steps
from overland.config.load import load_config
from overland.models.flops import count_parameters
from overland.models.registry import model_config


def steps(world_size: int, *settings: str):
    config = load_config("llama3_debug", settings, env={}).config
    return config, fake_steps(config, world_size)


def test_shards_are_a_fair_share_of_the_model() -> None:
    config, (step,) = steps(64, "parallelism.tensor_parallel_degree=4")
    whole = count_parameters(model_config(config.model)).total
    assert step.parameters == pytest.approx(whole / 64, rel=0.02)
    assert step.parameter_bytes == step.gradient_bytes == 4 * step.parameters
    assert step.optimizer_bytes == 8 * step.parameters
    assert step.collectives["all-gather"] > 0


def test_a_pipeline_is_checked_at_both_ends() -> None:
    _, (first, last) = steps(
        32, "parallelism.pipeline_parallel_degree=2", "parallelism.context_parallel_degree=2"
    )
    assert (first.rank, last.rank) == (0, 31)
    assert first.activation_bytes > 0
    assert last.activation_bytes > 0


def test_every_combination_of_axes_is_checked_in_one_process() -> None:
    """A pipeline is checked in several worlds, one after the other; none may take over what DTensor
    remembers of the one before."""
    tiny = ["model.overrides.num_hidden_layers=2", "training.seq_len=64"]
    for tp, cp, dp in itertools.product((1, 2), repeat=3):
        pp = 2
        degrees = {"pipeline": pp, "tensor": tp, "context": cp}
        settings = [f"parallelism.{axis}_parallel_degree={n}" for axis, n in degrees.items()]
        _, found = steps(pp * tp * cp * dp, *settings, *tiny)
        assert all(step.activation_bytes > 0 for step in found), (pp, tp, cp, dp)


def test_recompute_keeps_less_for_the_backward_pass() -> None:
    kept = [
        steps(8, f"activation_checkpoint.mode={mode}")[1][0].activation_bytes
        for mode in ("full", "selective", "none")
    ]
    assert kept == sorted(kept)
    assert kept[0] < kept[2] / 2
