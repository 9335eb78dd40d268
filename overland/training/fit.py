"""Fits a run to its devices' memory: decides `auto` (recompute, compilation), refuses what cannot
fit, and suggests ways to use less when memory runs out.

The run folder's config.toml keeps `auto`, since a run may be resumed on other hardware.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from overland.config.derived import (
    Degrees,
    recomputes_some_split_blocks,
    resolve_degrees,
    resolve_dtype,
)
from overland.config.schema import JobConfig
from overland.errors import OutOfMemoryError, TrainingError
from overland.kernels import has_triton, is_used
from overland.models.registry import model_config
from overland.optimizers.registry import state_bytes
from overland.optimizers.rule import BYTES
from overland.parallel.comm import from_first_rank
from overland.parallel.sharding import named_parameters, shard_of
from overland.training.memory import RECOMPUTE, StepMemory, can_estimate, step_memory
from overland.world import World
from overland.world.devices import (
    RANKS_PER_DEVICE,
    MemoryState,
    device_memory,
    machine_memory,
    memory_state,
)

GIB = 2**30
WORDS = {
    "none": "nothing is recomputed",
    "selective": "everything but matrix products and attention is recomputed",
    "full": "every block is recomputed",
}
# A run is refused if its estimate exceeds the memory by this factor: the estimate may be too high
# for devices and models that it was not compared with, and a run that fits must start.
MARGIN = 1.5
# `auto` leaves the rest to the driver, libraries and the allocator: an 8B step estimated at 91 % of
# an H200 runs there.
USABLE = 0.94


def resolve_auto(
    config: JobConfig, architecture: Any, degrees: Degrees, device: torch.device
) -> tuple[JobConfig, str]:
    """Returns the config with every `auto` replaced, and a line that says what was decided (empty
    if nothing was)."""
    config = resolve_dtype(config, device.type)
    notes = []
    if config.compile.enable == "auto":
        config = config.having({"compile.enable": compiles(config, device)})
        notes += ["blocks are compiled"] if config.compile.enable else []
    if config.activation_checkpoint.mode == "auto":
        is_compiled = bool(config.compile.enable)
        mode, note = choose_recompute(config, architecture, degrees, device, is_compiled)
        section = "activation_checkpoint"
        config = config.having({f"{section}.mode": mode, f"{section}.selective_ac_option": "op"})
        notes += [note] if note else []
    return config, "; ".join(notes)


def compiles(config: JobConfig, device: torch.device) -> bool:
    """Decides `compile.enable = auto`. On GPUs it is on unless torch cannot compile the config:
    Llama 3 1B on an H200 trains 41 k tokens/s without and 49 k with it, in less memory. That
    includes short runs, which usually test the speed and memory of a long one. On CPUs it is on
    only if the config requires it."""
    needs = config.activation_checkpoint.mode == "memory_budget"
    needs = needs or config.parallelism.enable_async_tensor_parallel
    can = not recomputes_some_split_blocks(config)
    return needs or (can and device.type == "cuda" and has_triton())


def choose_recompute(
    config: JobConfig, architecture: Any, degrees: Degrees, device: torch.device, compiled: bool
) -> tuple[str, str]:
    """Returns the mode of activation checkpointing, and why. Nothing is recomputed on a CPU, which
    can swap, or for a model without `activations`, for which there is no estimate."""
    if device.type != "cuda" or not can_estimate(architecture):
        return "none", ""
    # All ranks must agree: collectives inside a block are recomputed with it.
    device_bytes = from_first_rank(device_memory(device, config.comm.ranks_per_device))
    mode, memory = least_recompute(architecture, config, degrees, device_bytes, compiled)
    peak, there = memory.peak / 2**30, device_bytes / 2**30
    return mode, f"{WORDS[mode]}: estimated {peak:.1f} of {there:.1f} GiB"


def least_recompute(
    model: Any,
    config: JobConfig,
    degrees: Degrees,
    device_bytes: int,
    compiled: bool,
) -> tuple[str, StepMemory]:
    """Returns the first mode of RECOMPUTE that fits the device, or the last if none does, and its
    memory."""
    for recompute in RECOMPUTE:
        memory = step_memory(model, config, degrees, recompute, compiled, kernels_of(config))
        if memory.peak <= USABLE * device_bytes:
            break
    return recompute, memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. The GPU allocator has its own error class; the CPU allocator raises a
    RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


@contextmanager
def memory_in_words(config: JobConfig, world: World, device: torch.device) -> Iterator[None]:
    """Turns an out-of-memory error into one sentence with suggested fixes."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        degrees = resolve_degrees(config.parallelism, world.size, world.local_size)
        raise out_of_memory(config, degrees, device) from None


def out_of_memory(config: JobConfig, degrees: Degrees, device: torch.device) -> OutOfMemoryError:
    """Returns a short error in place of a page of stack traces. A model whose config has no
    `activations` gets no estimates."""
    where = gpu_in_words(config) if device.type == "cuda" else "this machine"
    what = f"out of memory on {where}"
    if device.type == "cuda":
        total = device_memory(device, config.comm.ranks_per_device)
        held = torch.cuda.max_memory_allocated(device)
        what += f": {held / GIB:.1f} GiB of {total / GIB:.1f} GiB were allocated by tensors"
    return OutOfMemoryError(with_ways_out(what, config, degrees, device))


def gpu_in_words(config: JobConfig) -> str:
    """Returns what a rank has of a GPU."""
    shared = config.comm.ranks_per_device
    part = f"this rank's part of the GPU ({RANKS_PER_DEVICE}={shared})"
    return "this GPU" if shared == 1 else part


def held_bytes(parts: Sequence[nn.Module], config: JobConfig) -> float:
    """Returns the bytes that parameters, gradients and optimizer state of this rank take at least,
    which depend on no estimate. `parts` may be on the meta device."""
    parameters = named_parameters(parts)
    trained = {name: one for name, one in parameters.items() if one.requires_grad}
    local = {name: tuple(shard_of(one).shape) for name, one in trained.items()}
    held = sum(shard_of(one).nbytes for one in parameters.values()) + state_bytes(config, local)
    narrow = BYTES[config.training.mixed_precision_param]
    return held + sum(
        prod(local[name]) * min(one.itemsize, narrow) for name, one in trained.items()
    )


def require_memory(
    config: JobConfig,
    architecture: Any,
    degrees: Degrees,
    device: torch.device,
    held: float,
    num_ranks: int,
) -> None:
    """Raises before anything is allocated if the run cannot fit; see `health.check_memory`. `held`:
    the mean of `held_bytes` over ranks; `num_ranks`: those of this machine."""
    peak = 0.0
    if can_estimate(architecture):
        peak = estimate(config, architecture, degrees, device).peak
    machine = "this machine", machine_memory()
    if device.type != "cuda":
        needs = [(*machine, num_ranks * held, num_ranks * peak)]
    else:
        gpu = gpu_in_words(config), float(device_memory(device, config.comm.ranks_per_device))
        needs = [(*gpu, held, peak)]
        if config.training.enable_cpu_offload:  # the state is in the machine's memory
            needs = [(*machine, num_ranks * held, 0.0), (*gpu, 0.0, peak)]
    for where, there, least, likely in needs:
        if config.health.check_memory and max(least, likely / MARGIN) > there:
            what = (
                f"this run needs about {max(least, likely) / GIB:.1f} GiB on {where}, which has "
                f"{there / GIB:.1f} GiB; health.check_memory=false starts it anyway"
            )
            raise TrainingError(with_ways_out(what, config, degrees, device))


def rank_killed(config: JobConfig, num_ranks: int, device_type: str, before: MemoryState) -> str:
    """Returns the message for a rank that got SIGKILL, which the system sends when memory runs out,
    and so does whoever wants to end it. `before`: the memory when the ranks were started."""
    now = memory_state()
    if now.kills is not None and now.kills == before.kills:
        return (
            "a rank was killed (SIGKILL), and not for lack of memory: the kernel reports none. "
            "Someone or a scheduler ended it; the same command resumes the run"
        )
    what = "a rank was killed, probably because the machine ran out of memory"
    if now.kills is None:
        what = "a rank was killed (SIGKILL), perhaps because the machine ran out of memory"
    if math.isfinite(before.free):  # known only on Linux
        what += f": this machine had {before.free / GIB:.1f} GiB free for {num_ranks} ranks"
    if device_type == "cuda":  # the machine's memory ran out, not a GPU's
        return (
            f"{what}. To use less: checkpoint.async_mode=disabled, which keeps no copy of the "
            "state; fewer data.tokenise_processes; a lower data.read_ahead"
        )
    degrees = resolve_degrees(config.parallelism, num_ranks, num_ranks)
    return with_ways_out(what, config, degrees, torch.device(device_type))


def with_ways_out(what: str, config: JobConfig, degrees: Degrees, device: torch.device) -> str:
    """Returns `what`, followed by the estimated memory of a step and ways to reduce it."""
    architecture = model_config(config.model)
    if not can_estimate(architecture):
        return (
            f"{what}. Lower training.local_batch_size (set training.global_batch_size to keep the "
            f"global batch), set activation_checkpoint.mode=full, or use more devices"
        )
    config = resolve_dtype(config, device.type)
    now = estimate(config, architecture, degrees, device)
    rows = max(1, config.training.local_batch_size // 2)
    fewer = config.having({"training.local_batch_size": rows})
    recomputed = config.having({"activation_checkpoint.mode": "full"})
    narrow = config.having({"optimizer.bf16_moments": True})
    two = replace(degrees, dp_shard=2 * degrees.dp_shard)
    ways = [
        (f"training.local_batch_size={rows} (set training.global_batch_size to keep the global "
         f"batch)", fewer, degrees),
        ("activation_checkpoint.mode=full", recomputed, degrees),
        ("optimizer.bf16_moments=true", narrow, degrees),
        ("sharding over twice as many devices", config, two),
    ]  # fmt: skip
    estimates = [(way, estimate(some, architecture, on, device).peak) for way, some, on in ways]
    helps = [(way, peak) for way, peak in estimates if peak < 0.99 * now.peak]
    listed = "; ".join(f"{way}: about {peak / GIB:.2f} GiB" for way, peak in helps)
    is_whole = device.type == "cuda" and config.comm.ranks_per_device == 1
    per = "device" if is_whole else "rank"
    listed = listed or "a smaller model or training.seq_len"
    return (
        f"{what}. A step is estimated to take {now.peak / GIB:.2f} GiB per {per}: parameters and "
        f"optimizer state {now.state / GIB:.2f}, gradients {now.gradients / GIB:.2f}, activations "
        f"{now.kept / GIB:.2f}. To use less: {listed}"
    )


def estimate(
    config: JobConfig, architecture: Any, degrees: Degrees, device: torch.device
) -> StepMemory:
    """Estimates the memory of a step as this rank would run it. It asks no other rank, since they
    may be doing something else."""
    compiled = config.compile.enable is True
    compiled = compiled or (config.compile.enable == "auto" and compiles(config, device))
    mode = config.activation_checkpoint.mode
    if mode == "auto" and device.type == "cuda":
        there = device_memory(device, config.comm.ranks_per_device)
        return least_recompute(architecture, config, degrees, there, compiled)[1]
    recompute = mode if mode in RECOMPUTE else "none"
    kernels = kernels_of(config)
    memory = step_memory(architecture, config, degrees, recompute, compiled, kernels)
    return memory if device.type == "cuda" else replace(memory, workspace=0.0)


def kernels_of(config: JobConfig) -> bool:
    """Whether the loss has our own kernel, which saves memory. A check has not applied the key."""
    return config.training.kernels == "auto" and is_used("cross_entropy")
