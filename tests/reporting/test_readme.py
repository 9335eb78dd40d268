import re
from pathlib import Path
from typing import Any

import pytest

from overland.apps.console.readme import (
    readme,
    recompute_in_words,
    schedule_in_words,
    strategy_in_words,
)
from overland.config.derived import resolve_degrees
from overland.config.schema import ActivationCheckpoint, JobConfig
from overland.models.registry import model_config
from overland.run_folder import RunFolder
from overland.words import command
from overland.world import World


def job(**sections: dict[str, Any]) -> JobConfig:
    return JobConfig.model_validate(sections)


def page(config: JobConfig, num_devices: int = 1) -> str:
    world = World(0, num_devices, 0, min(num_devices, 8))
    degrees = resolve_degrees(config.parallelism, world.size, world.local_size)
    return readme(config, world, degrees, model_config(config.model), RunFolder(config))


@pytest.mark.parametrize(
    ("num_devices", "parallelism", "words"),
    [
        (1, {}, ["One device holds the whole model."]),
        (8, {}, ["sharded over 8 devices (FSDP)", "gathered again for the backward pass"]),
        (8, {"sharding_stage": "zero2"}, ["sharded over 8 devices", "gathered once per step"]),
        (
            8,
            {"sharding_stage": "zero0"},
            ["The model is replicated 8 times, and gradients are summed"],
        ),
        (
            8,
            {"data_parallel_replicate_degree": 2},
            ["sharded over 4 devices", "that group is replicated 2 times"],
        ),
        (
            16,
            {
                "tensor_parallel_degree": 2,
                "pipeline_parallel_degree": 2,
                "context_parallel_degree": 2,
            },
            [
                "sharded over 2 devices",
                "each matrix is split over 2 devices",
                "a pipeline of 2 stages",
                "each sequence is split over 2 devices",
            ],
        ),
    ],
)
def test_a_layout_is_told_in_words(
    num_devices: int, parallelism: dict[str, Any], words: list[str]
) -> None:
    config = job(parallelism=parallelism)
    text = strategy_in_words(resolve_degrees(config.parallelism, num_devices, num_devices))
    assert text[0].isupper()
    assert text.endswith(".")
    for part in words:
        assert part in text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "packed, attention crosses document boundaries"),
        ({"packing": "best_fit", "document_mask": True}, "attention stays within each document"),
        ({"packing": "trunc"}, "each starts a new sequence"),
    ],
)
def test_it_says_what_documents_share(data: dict[str, Any], words: str) -> None:
    assert f"| documents | {words} |" in page(job(data=data))


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"warmup_steps": 20}, "20 warm-up steps, then linear decay to 0"),
        (
            {"warmup_steps": 20, "decay_type": "cosine", "min_lr_factor": 0.1},
            "20 warm-up steps, then cosine decay to 0.0001",
        ),
        ({"warmup_steps": 5, "min_lr": 2e-5}, "5 warm-up steps, then linear decay to 2e-05"),
        (
            {"warmup_steps": 5, "decay_ratio": 0.2},
            "5 warm-up steps, a plateau, linear decay over the last 20% to 0",
        ),
        ({"warmup_steps": 0, "decay_type": "constant"}, "0 warm-up steps, then constant"),
    ],
)
def test_a_schedule_is_told_in_words(schedule: dict[str, Any], words: str) -> None:
    assert schedule_in_words(job(lr_scheduler=schedule, optimizer={"lr": 1e-3})) == words


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "none"}, "off"),
        ({"mode": "full"}, "full: every block is recomputed"),
        ({"mode": "selective"}, "selective: everything but matrix products"),
        (
            {"mode": "selective", "selective_ac_option": "2"},
            "selective: one block in 2 is recomputed",
        ),
        (
            {"mode": "selective", "selective_ac_option": "1"},
            "selective: every block is recomputed",
        ),
    ],
)
def test_recomputation_is_told_in_words(settings: dict[str, Any], words: str) -> None:
    assert recompute_in_words(ActivationCheckpoint(**settings)).startswith(words)


def test_the_page_is_filled_in_with_the_values_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # commands by their paths
    folder = tmp_path / "run"
    text = page(
        job(
            job={"dump_folder": str(folder), "description": "a test of words"},
            training={"seq_len": 512, "local_batch_size": 2, "global_batch_size": 32, "steps": 10},
            compile={"enable": True},
            profiling={"enable_profiling": True, "profile_freq": 7},
            checkpoint={"interval": 50, "keep_latest_k": 3},
            data={"document_mask": True},
        ),
        num_devices=8,
    )
    for words in (
        "# a test of words",
        "32 sequences = 16,384 tokens per step; 2 × 2 per device",
        "| steps | 10 (163,840 tokens) |",
        "attention stays within each document",
        "Compile: on (inductor)",
        "Profiling: on, one trace every 7 steps",
        "Checkpoints: every 50 steps, the newest 3 kept",
        command("overland", "train", f"{folder}/config.toml"),
        command("overland", "generate", folder),
        command("overland", "watch", folder),
        command("overland", "check", f"{folder}/config.toml"),
        command("tensorboard", "--logdir", f"{folder}/tb"),
    ):
        assert words in text
    assert not re.search(r"\{[A-Z_]+\}", text)


def test_what_is_off_is_said_to_be_off() -> None:
    text = page(job(checkpoint={"enable": False}, metrics={"enable_tensorboard": False},
                    training={"max_norm": 0.0}, compile={"enable": False}))  # fmt: skip
    for words in ("Checkpoints: off", "TensorBoard events (off)", "gradient clipping | off",
                  "Compile: off", "Profiling: off"):  # fmt: skip
        assert words in text
    assert "Checkpoints: every 500 steps, all kept" in page(job(checkpoint={"keep_latest_k": 0}))
