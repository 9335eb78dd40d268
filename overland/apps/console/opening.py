"""The table that a run prints at its start, before the first long wait: model, data, batch, layout,
estimated memory, and the checkpoint it resumes.
"""

from __future__ import annotations

from typing import Any

import torch

from overland.apps.console.readme import parameters_in_words, strategy_in_words
from overland.checkpoint.folder import committed
from overland.config.derived import Degrees, model_name, rows_per_step
from overland.config.schema import JobConfig
from overland.data.wanted import held_out_sources, sources_of, validates_on_holdout
from overland.models.flops import measure_of
from overland.run_folder import RunFolder
from overland.training.fit import GIB, estimate
from overland.training.memory import can_estimate
from overland.training.records import precision_of
from overland.words import first_few, in_columns, number_of
from overland.world import World
from overland.world.devices import device_memory, devices_in_words

MOST_NAMES = 4


def opening(
    config: JobConfig,
    world: World,
    degrees: Degrees,
    architecture: Any,
    device: torch.device,
) -> str:
    """Returns a table with the model, the data, the hardware and layout, and the run folder."""
    nodes = f", {world.num_nodes:,} nodes" if world.num_nodes > 1 else ""
    devices = devices_in_words(world, config.training.device, config.comm.ranks_per_device)
    lines = {
        **lines_of_plan(config, degrees, architecture, devices + nodes),
        "memory": memory_in_words(config, architecture, degrees, device),
        "run": run_in_words(config, RunFolder(config)),
    }
    return in_columns(lines)


def lines_of_plan(
    config: JobConfig, degrees: Degrees, architecture: Any, devices: str, steps: int | None = None
) -> dict[str, str]:
    """Returns what is known without a device; `steps`: see `batch_in_words`."""
    layout = strategy_in_words(degrees).rstrip(".")
    return {
        "model": f"{model_name(config)}, {parameters_in_words(config, architecture)}",
        "data": data_in_words(config),
        "batch": batch_in_words(config, degrees, architecture, steps),
        "devices": devices,
        "layout": layout[0].lower() + layout[1:],
        "precision": precision_in_words(config),
    }


def batch_in_words(
    config: JobConfig, degrees: Degrees, architecture: Any, steps: int | None = None
) -> str:
    """Returns the size of a step and the length of the run. `steps` is the number of steps that
    the epochs come to, if it is known already."""
    training = config.training
    rows = rows_per_step(training, degrees.dp)
    measure = measure_of(architecture, training.seq_len, config.lora, config.model.freeze)
    batch = f"{rows:,} samples"
    if measure.unit == "tokens":
        batch = f"{rows:,} × {training.seq_len:,} = {rows * training.seq_len:,} tokens"
    length = []
    if training.epochs:
        length.append(f"{training.epochs:g} epoch{'' if training.epochs == 1 else 's'}")
    else:
        steps = training.steps
    if steps is not None:
        total = f"{rows * measure.per_row * steps:,} {measure.unit}"
        length.append(f"{number_of(steps, 'step')} ({total})")
    return f"{batch} per step; {' = '.join(length)}"


def precision_in_words(config: JobConfig) -> str:
    kinds = precision_of(config.training)
    if kinds["computation"] == "auto":  # `overland check`, of a run on any device
        kinds["computation"] = "bfloat16 (float32 on a CPU)"
    return ", ".join(f"{what} {kind}" for what, kind in kinds.items())


def data_in_words(config: JobConfig) -> str:
    names = first_few(
        [name for name, one in sources_of(config).items() if one.asked.weight], MOST_NAMES
    )
    held_out = list(held_out_sources(config))
    if validates_on_holdout(config):
        holdout = config.data.holdout
        is_share = isinstance(holdout, float)
        share = f"{100 * holdout:.3g}%" if is_share else number_of(int(holdout), "document")
        held_out.insert(0, f"{share} of the training data")
    return f"{names}; held out: {first_few(held_out, MOST_NAMES)}" if held_out else names


def memory_in_words(
    config: JobConfig, architecture: Any, degrees: Degrees, device: torch.device
) -> str:
    """Returns the estimated peak memory of a step on one device, and how much the device has, or
    the part of it that a rank may use."""
    if not can_estimate(architecture):
        return "no estimate: the model's config does not define activations"
    peak = estimate(config, architecture, degrees, device).peak
    if device.type == "cuda":
        there = device_memory(device, config.comm.ranks_per_device)
        per = "device" if config.comm.ranks_per_device == 1 else "rank"
        return f"about {peak / GIB:.1f} of {there / GIB:.1f} GiB per {per} (estimate)"
    return f"about {binary_size(peak)} per rank for the tensors of a step (estimate)"


def binary_size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes > GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


def run_in_words(config: JobConfig, folder: RunFolder) -> str:
    """Returns the run folder, and the checkpoint in it that the run resumes, if there is one."""
    resumes = config.checkpoint.enable and config.checkpoint.resume == "auto"
    found = committed(folder.checkpoints) if resumes else []
    return f"{folder.root}, resuming from {found[-1].name}" if found else str(folder.root)
