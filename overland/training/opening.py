"""The table that a run prints at its start, before the first long wait."""

from __future__ import annotations

from typing import Any

import torch

from overland.checkpoint.folder import committed
from overland.config.derived import Degrees
from overland.config.schema import JobConfig
from overland.data.registry import held_out_sources, sources_of, validates_on_holdout
from overland.models.flops import measure_of
from overland.run_folder import RunFolder
from overland.training.memory import can_estimate
from overland.training.out_of_memory import GIB, estimate
from overland.training.readme import model_name, parameters_in_words, strategy_in_words
from overland.training.sessions import precision_of
from overland.words import number_of
from overland.world import World
from overland.world.devices import device_name

MOST_NAMES = 4


def opening(
    config: JobConfig,
    world: World,
    degrees: Degrees,
    architecture: Any,
    device: torch.device,
    folder: RunFolder,
) -> str:
    """Returns a table with the model, the data, the hardware and layout, and the run folder."""
    training = config.training
    rows = training.global_batch_size
    rows = training.local_batch_size * degrees.dp if rows == -1 else rows
    measure = measure_of(architecture, training.seq_len, config.lora)
    batch, total = f"{rows:,} samples", ""
    if measure.unit == "tokens":
        batch = f"{rows:,} × {training.seq_len:,} = {rows * training.seq_len:,} tokens"
    length = number_of(training.steps, "step")
    if training.epochs:
        length = f"{training.epochs:g} epoch{'' if training.epochs == 1 else 's'}"
    if not training.epochs:
        total = f" ({rows * measure.per_row * training.steps:,} {measure.unit})"
    nodes = f", {world.num_nodes:,} nodes" if world.num_nodes > 1 else ""
    layout = strategy_in_words(degrees).rstrip(".")
    lines = {
        "model": f"{model_name(config)}, {parameters_in_words(config, architecture)}",
        "data": data_in_words(config),
        "batch": f"{batch} per step; {length}{total}",
        "devices": f"{world.size:,} × {device_name()}{nodes}",
        "layout": layout[0].lower() + layout[1:],
        "precision": ", ".join(f"{what} {kind}" for what, kind in precision_of(training).items()),
        "memory": memory_in_words(config, architecture, degrees, device),
        "run": run_in_words(config, folder),
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:{width}}  {words}" for name, words in lines.items())


def data_in_words(config: JobConfig) -> str:
    names = _some([name for name, one in sources_of(config).items() if one.weight])
    held_out = list(held_out_sources(config))
    if validates_on_holdout(config):
        holdout = config.data.holdout
        is_share = isinstance(holdout, float)
        share = f"{100 * holdout:.3g}%" if is_share else number_of(int(holdout), "document")
        held_out.insert(0, f"{share} of the training data")
    return f"{names}; held out: {_some(held_out)}" if held_out else names


def memory_in_words(
    config: JobConfig, architecture: Any, degrees: Degrees, device: torch.device
) -> str:
    """Returns the estimated peak memory of a step on one device, and how much the device has."""
    if not can_estimate(architecture):
        return "no estimate: the model's config does not define activations"
    peak = estimate(config, architecture, degrees, device).peak
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
        return f"about {peak / GIB:.1f} of {there / GIB:.1f} GiB per device (estimate)"
    shown = f"{peak / GIB:.2f} GiB" if peak > GIB / 10 else f"{peak / 2**20:.1f} MiB"
    return f"about {shown} per rank for the tensors of a step (estimate)"


def run_in_words(config: JobConfig, folder: RunFolder) -> str:
    """Returns the run folder, and the checkpoint in it that the run resumes, if there is one."""
    found = committed(folder.checkpoints) if config.checkpoint.resume == "auto" else []
    return f"{folder.root}, resuming from {found[-1].name}" if found else str(folder.root)


def _some(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
