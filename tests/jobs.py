"""Tiny training runs, in this process or on a pool of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from overland.config.schema import JobConfig
from overland.models.config import DecoderConfig
from overland.models.init import init_weights
from overland.models.registry import build_model
from overland.training.build import build_run
from overland.training.callbacks import Callback, Record
from overland.training.loop import conclude, train
from overland.training.run import Run
from overland.world import World

TINY_MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


def tiny_job(folder: Path, **sections: dict[str, Any]) -> JobConfig:
    """A float64 job on random tokens; `section={key: value}` changes it."""
    settings: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": str(folder)},
        "model": {"overrides": dict(TINY_MODEL)},
        "training": {
            "dataset": "random",
            "seq_len": 32,
            "local_batch_size": 8,
            "global_batch_size": 8,
            "steps": 6,
            "dtype": "float64",
            "mixed_precision_param": "float64",
            "mixed_precision_reduce": "float64",
        },
        "lr_scheduler": {"warmup_steps": 2},
        "optimizer": {"lr": 1e-2},
        "metrics": {"log_freq": 1, "enable_tensorboard": False},
        "checkpoint": {"enable": False},
    }
    for section, values in sections.items():
        settings.setdefault(section, {}).update(values)
    if settings["training"].get("dataset_path") or settings.get("data", {}).get("sources"):
        del settings["training"]["dataset"]
    return JobConfig.model_validate(settings)


def write_model(folder: Path, **changes: Any) -> Path:
    """A tiny Llama with random weights, as Hugging Face stores one; the tokenizer is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = DecoderConfig(model_type="llama", **{**TINY_MODEL, **changes})
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    model = build_model(config)
    init_weights(model, seed=1)
    tensors = {name: one.detach().clone() for name, one in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


class Recorder(Callback):
    """Keeps what a run logged and said."""

    def __init__(self, run: Run) -> None:
        self.records: list[Record] = []
        self.validations: list[Record] = []
        self.messages: list[str] = []

    def on_log(self, run: Run, record: Record) -> None:
        self.records.append(record)

    def on_validation(self, run: Run, record: Record) -> None:
        self.validations.append(record)

    def on_message(self, run: Run, message: str) -> None:
        self.messages.append(message)

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records]


def run_job(world: World, config: JobConfig, *extra: Callback) -> Recorder:
    """Trains on this rank (a process group is there already)."""
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    recorder = Recorder(run)
    run.callbacks += [recorder, *extra]
    if train(run):
        conclude(run)
    return recorder


def losses(world: World, config: JobConfig) -> list[float]:
    return run_job(world, config).losses


def losses_and_norms(world: World, config: JobConfig) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in run_job(world, config).records]
