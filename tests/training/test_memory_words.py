"""Without memory a run ends in one sentence, with ways out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from overland.config.derived import resolve_degrees
from overland.errors import Kind
from overland.models.registry import model_config
from overland.training.out_of_memory import is_out_of_memory, out_of_memory, rank_killed
from overland.world.last_words import error_kind
from tests.jobs import tiny_job


def test_what_was_held_and_three_ways_out_are_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as met:  # what this machine's allocator really says
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(met.value)
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    # The number format, recomputation and compilation are left to the device, as by default.
    config = tiny_job(tmp_path, training={"dtype": "float32", "mixed_precision_param": "auto"})
    degrees = resolve_degrees(config.parallelism, 1)
    error = out_of_memory(config, model_config(config.model), degrees, torch.device("cpu"))
    said = str(error)
    assert error_kind(error) is Kind.MEMORY
    for way in ("local_batch_size=4", "activation_checkpoint.mode=full", "bf16_moments=true"):
        assert re.search(rf"{way}[^;]*: about [\d.]+ GiB", said), said


def test_a_way_out_that_frees_nothing_is_not_advised(tmp_path: Path) -> None:
    config = tiny_job(
        tmp_path,
        model={"name": "llama3", "flavor": "8B", "overrides": {}},
        training={"local_batch_size": 1},
        activation_checkpoint={"mode": "full"},
        optimizer={"bf16_moments": True},
    )
    degrees = resolve_degrees(config.parallelism, 1)
    said = str(out_of_memory(config, model_config(config.model), degrees, torch.device("cpu")))
    assert re.search(r"To use less: sharding over twice as many devices: about [\d.]+ GiB$", said)


def test_a_way_out_that_frees_next_to_nothing_is_not_advised(tmp_path: Path) -> None:
    config = tiny_job(tmp_path, training={"local_batch_size": 4096})
    degrees = resolve_degrees(config.parallelism, 1)
    said = str(out_of_memory(config, model_config(config.model), degrees, torch.device("cpu")))
    assert "local_batch_size=2048" in said
    assert "bf16_moments" not in said  # kilobytes, where activations take gigabytes


def test_a_rank_that_was_killed_beside_gpus_lacked_the_machines_memory(tmp_path: Path) -> None:
    config = tiny_job(tmp_path)
    said = rank_killed(config, model_config(config.model), 8, torch.device("cuda"), 3 * 2**30)
    assert "this machine had 3.0 GiB free for 8 ranks. To use less: checkpoint.async_mode" in said
