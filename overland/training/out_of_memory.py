"""What to say when a run is out of memory: what was held, and ways out with estimates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from overland.config.derived import Degrees, resolve_degrees, settle_dtype
from overland.config.schema import JobConfig
from overland.errors import OutOfMemoryError
from overland.training.auto import compiles
from overland.training.memory import (
    RECOMPUTE,
    StepMemory,
    can_estimate,
    least_recompute,
    step_memory,
)

GIB = 2**30


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. A GPU's allocator has an error class of its own; the CPU's raises a
    RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def out_of_memory(
    config: JobConfig, architecture: Any, degrees: Degrees, device: torch.device
) -> OutOfMemoryError:
    """Returns an error of one sentence in place of a page of traces. For a model whose config has
    no `activations` there are no estimates."""
    where = "this GPU's" if device.type == "cuda" else "this machine's"
    what = f"out of {where} memory"
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        held = torch.cuda.max_memory_allocated(device)
        what += f": {held / GIB:.1f} GiB of {total / GIB:.1f} GiB were held by tensors"
    return OutOfMemoryError(with_ways_out(what, config, architecture, degrees, device))


def rank_killed(
    config: JobConfig, architecture: Any, num_ranks: int, device: torch.device, free: float
) -> str:
    """Returns what to say when a rank got SIGKILL, which the system sends where memory has run out.
    `free`: bytes of the machine's memory before the ranks were started."""
    what = "a rank was killed, probably for lack of memory"
    if math.isfinite(free):  # known on Linux alone
        what += f": this machine had {free / GIB:.1f} GiB free for {num_ranks} ranks"
    if device.type == "cuda":  # the machine's memory ran out, not a GPU's
        return (
            f"{what}. Ways out: checkpoint.async_mode=disabled, which keeps no copy of the state; "
            "fewer data.tokenise_processes; a lower data.read_ahead"
        )
    degrees = resolve_degrees(config.parallelism, num_ranks, num_ranks)
    return with_ways_out(what, config, architecture, degrees, device)


def with_ways_out(
    what: str, config: JobConfig, architecture: Any, degrees: Degrees, device: torch.device
) -> str:
    """Returns `what`, followed by what a step takes by estimate and by the ways to take less."""
    if not can_estimate(architecture):
        return (
            f"{what}. Lower training.local_batch_size (training.global_batch_size keeps the "
            f"batch), set activation_checkpoint.mode=full, or use more devices"
        )
    training = settle_dtype(config.training, device.type)
    config = config.model_copy(update={"training": training})
    now = estimate(config, architecture, degrees, device)
    rows = max(1, training.local_batch_size // 2)
    fewer = config.model_copy(update={"training": _with(training, local_batch_size=rows)})
    recompute = _with(config.activation_checkpoint, mode="full")
    recomputed = config.model_copy(update={"activation_checkpoint": recompute})
    moments = _with(config.optimizer, bf16_moments=True)
    narrow = config.model_copy(update={"optimizer": moments})
    two = replace(degrees, dp_shard=2 * degrees.dp_shard)
    ways = [
        (f"training.local_batch_size={rows} (with training.global_batch_size the batch stays "
         f"what it is)", fewer, degrees),
        ("activation_checkpoint.mode=full", recomputed, degrees),
        ("optimizer.bf16_moments=true", narrow, degrees),
        ("twice as many devices to shard over", config, two),
    ]  # fmt: skip
    estimates = [(way, estimate(some, architecture, on, device).peak) for way, some, on in ways]
    helps = [(way, peak) for way, peak in estimates if peak < now.peak]
    listed = "; ".join(f"{way}: about {peak / GIB:.2f} GiB" for way, peak in helps)
    listed = listed or "a smaller model or training.seq_len"
    return (
        f"{what}. By estimate a step takes {now.peak / GIB:.2f} GiB per device: parameters and "
        f"optimizer state {now.state / GIB:.2f}, gradients {now.gradients / GIB:.2f}, kept for the "
        f"backward pass {now.kept / GIB:.2f}. Ways out: {listed}"
    )


def estimate(
    config: JobConfig, architecture: Any, degrees: Degrees, device: torch.device
) -> StepMemory:
    """Estimates the run as this rank would start it. It asks no other rank: they may be
    elsewhere."""
    compiled = config.compile.enable is True
    compiled = compiled or (config.compile.enable == "auto" and compiles(config, device))
    mode = config.activation_checkpoint.mode
    if mode == "auto" and device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
        return least_recompute(architecture, config, degrees, there, compiled)[1]
    recompute = mode if mode in RECOMPUTE else "none"
    return step_memory(architecture, config, degrees, recompute, compiled)


def _with(section: Any, **update: object) -> Any:
    return section.model_copy(update=update)
