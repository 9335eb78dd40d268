"""A trained model in one process, from its run folder or one of its checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from overland.checkpoint.folder import latest_checkpoint
from overland.checkpoint.formats.overland import step_of_export
from overland.checkpoint.origin import Origin
from overland.checkpoint.read import fill, open_checkpoint
from overland.checks.model import check_custom_import
from overland.config.errors import ConfigError
from overland.config.load import load_config
from overland.config.schema import JobConfig
from overland.data.tokenizer import Tokenizer
from overland.data.tokenizer_choice import tokenizer_of
from overland.errors import CheckpointError
from overland.models.flops import sample_fields
from overland.models.hf import load_hf
from overland.models.init import cast_floats, init_buffers, persistent_buffers
from overland.models.registry import model_config
from overland.parallel.apply import build_undivided
from overland.run_folder import COMMITTED, CONFIG
from overland.world.devices import device_type


def open_model(path: Path) -> tuple[nn.Module, Tokenizer, JobConfig]:
    """The model with its weights, on this machine's device, with its tokenizer and config."""
    run, step = find_run(path)
    loaded = load_config(str(run / CONFIG), env={})
    if problems := list(check_custom_import(loaded)):  # the model may be one of the user's own
        raise ConfigError(problems)
    config = loaded.config
    if step is None:
        step = latest_checkpoint(run / config.checkpoint.folder)
    if step is None:
        raise CheckpointError(f"{run} holds no checkpoint yet")
    architecture = model_config(config.model)
    if sample_fields(architecture) is not None:
        raise CheckpointError(f"{run} holds a model of arrays, not of text: it has no tokenizer")
    tokenizer = tokenizer_of(run, config.data)
    lora = config.lora
    if lora.base != "nf4":  # then all have one type, below
        lora = lora.model_copy(update={"base": "float32"})
    model = build_undivided(architecture, config.model_copy(update={"lora": lora}))
    init_buffers(model, torch.device("cpu"))  # those that checkpoints do not hold
    state = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    with open_checkpoint(step) as saved:
        origin = Origin.from_json(saved.run)
        if origin is not None:
            load_hf(model, origin.find(), strict=False, only=origin.names)
            state = {n: v for n, v in state.items() if n.removeprefix("model.") not in origin.names}
        buffers = {f"model.{name}": b for name, b in persistent_buffers(model).items()}
        state |= {name: b for name, b in buffers.items() if name in saved.tensors}
        fill(saved, state)
    dtype = torch.float32 if device_type() == "cpu" else torch.bfloat16
    return cast_floats(model, dtype).to(device_type()).eval(), tokenizer, config


def find_run(path: Path) -> tuple[Path, Path | None]:
    """(run folder, checkpoint if one was named)."""
    if (path / CONFIG).is_file():
        return path, None
    if (step := step_of_export(path)) is not None:  # its adapters, as PEFT stores them
        return path.absolute().parent, step
    for folder in path.absolute().parents[:3]:
        if (folder / CONFIG).is_file() and (path / COMMITTED).is_file():
            return folder, path
    raise CheckpointError(f"{path} is neither a run folder nor a checkpoint inside one")
