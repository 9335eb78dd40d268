"""A trained model in one process, from its run folder or one of its checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from overland.checkpoint.errors import CheckpointError
from overland.checkpoint.store import latest_checkpoint, load
from overland.cluster.devices import device_type
from overland.config.load import load_config
from overland.config.schema import JobConfig
from overland.data.tokenizer import Tokenizer
from overland.models.registry import build_model, model_config


def open_checkpoint(path: Path) -> tuple[nn.Module, Tokenizer, JobConfig]:
    """The model with its weights, on this machine's device, with its tokenizer and config."""
    run, step = find_run(path)
    config = load_config(str(run / "config.toml"), env={}).config
    if step is None:
        step = latest_checkpoint(run / config.checkpoint.folder)
    if step is None:
        raise CheckpointError(f"{run} holds no checkpoint yet")
    model = build_model(model_config(config.model))
    load(step, model)
    dtype = torch.float32 if device_type() == "cpu" else torch.bfloat16
    return model.to(device_type(), dtype).eval(), Tokenizer(run / "tokenizer"), config


def find_run(path: Path) -> tuple[Path, Path | None]:
    """(run folder, checkpoint if one was named)."""
    for folder in (path, *path.absolute().parents[:3]):
        if (folder / "config.toml").is_file():
            return folder, None if folder == path else path
    raise CheckpointError(f"{path} is neither a run folder nor a checkpoint inside one")
