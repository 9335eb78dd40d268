"""Estimates the peak memory of a training step on one device, from shapes alone (no torch).

The state (parameters and optimizer state) lives through the whole step. The peak adds to it the
worst of three moments:

    head     everything that blocks keep for the backward pass, and the logits of one chunk
    block    the same, and the intermediate tensors of the first block's backward pass
    update   all gradients, and nothing of the above

On one device the estimate is within 1 % of measurements for 1B to 8B parameters, 8 k to 64 k
tokens, bfloat16 and 8 bits, adapters on 16-bit and 4-bit weights, compiled or not, and within 3 %
if every block is recomputed (tests/planner/test_memory.py). For several devices it counts in the
same way, but has not been compared with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from operator import mul
from typing import Any

from overland.config.derived import STAGES_PER_RANK, Degrees, rows_per_step
from overland.config.schema import JobConfig
from overland.models.flops import (
    Shapes,
    count_parameters,
    own_method,
    stage_costs,
    trained_parameters,
)
from overland.models.sizes import EMBEDDING, HEAD, NF4_BYTES, PassShape
from overland.optimizers.registry import state_bytes
from overland.optimizers.rule import BYTES

RECOMPUTE = ("none", "selective", "full")  # from the fastest to the one that needs least memory
# The rest is for the driver, libraries and the allocator: an 8B step estimated at 91 % of an H200
# runs there.
USABLE = 0.94


@dataclass(frozen=True)
class StepMemory:
    """The bytes of a step on one device."""

    state: float
    gradients: float
    kept: float  # by the blocks, from the forward to the backward pass
    head: float
    block: float  # intermediate tensors of one block's backward pass
    accumulates: bool  # gradients live through all passes of a step

    @property
    def peak(self) -> float:
        passing = max(self.kept + self.head, self.kept + self.block)
        if self.accumulates:
            return self.state + self.gradients + passing
        return self.state + max(passing, self.gradients + self.block)


def can_estimate(model: Any) -> bool:
    """Whether the class of the model's config defines `activations` and its blocks are known."""
    return own_method(model, "activations") is not None and bool(count_parameters(model).blocks)


def least_recompute(
    model: Any,
    config: JobConfig,
    degrees: Degrees,
    device_bytes: int,
    compiled: bool,
    kernels: bool = True,
) -> tuple[str, StepMemory]:
    """Returns the first mode of RECOMPUTE that fits the device, or the last if none does, and its
    memory."""
    for recompute in RECOMPUTE:
        memory = step_memory(model, config, degrees, recompute, compiled, kernels)
        if memory.peak <= USABLE * device_bytes:
            break
    return recompute, memory


def step_memory(
    model: Any,
    config: JobConfig,
    degrees: Degrees,
    recompute: str,
    compiled: bool,
    kernels: bool = True,
) -> StepMemory:
    """Estimates a step of a model whose config has `activations` (see models/sizes.py).
    `recompute` is one of RECOMPUTE (selective: by operator); `kernels`: whether our own kernels
    are used, as on NVIDIA GPUs."""
    training = config.training
    rows = training.local_batch_size
    if degrees.pp > 1:
        rows = config.parallelism.pipeline_parallel_microbatch_size
    one = PassShape(
        tokens=rows * training.seq_len // degrees.cp,
        size=BYTES[training.mixed_precision_param],
        tp=degrees.tp,
        cp=degrees.cp,
        recompute=recompute,
        compiled=compiled,
        float8=training.float8 != "off",
        kernels=kernels,
        trains_head=not {EMBEDDING, HEAD}.isdisjoint(_trained(model, config)),
    )
    made = model.activations(one)
    state, gradients = _state(model, config, degrees)
    return StepMemory(
        state,
        gradients,
        kept=blocks_kept(model, config, degrees) * made.kept,
        head=made.head,
        block=made.block,
        accumulates=_accumulates(config, degrees),
    )


def blocks_kept(model: Any, config: JobConfig, degrees: Degrees) -> int:
    """Returns how many blocks keep their activations at the same time, each counted once per
    micro-batch in flight; in a pipeline, on the rank that keeps the most."""
    pp, layout = degrees.pp, config.parallelism
    if pp == 1:
        return len(count_parameters(model).blocks)
    from overland.parallel.pipeline import deal_blocks, micro_batches_kept, stages_of_rank

    schedule = layout.pipeline_parallel_schedule
    shares = deal_blocks(stage_costs(model), pp * STAGES_PER_RANK[schedule])
    count = int(_rows_of_rank(config, degrees)) // layout.pipeline_parallel_microbatch_size
    most = 0
    for rank, combinations in enumerate(micro_batches_kept(schedule, pp, max(1, count))):
        blocks = [len(shares[number]) for number in stages_of_rank(rank, pp, schedule)]
        most = max(most, *(sum(map(mul, counts, blocks)) for counts in combinations))
    return most


def _state(model: Any, config: JobConfig, degrees: Degrees) -> tuple[float, float]:
    """Returns the bytes of parameters and optimizer state, and the bytes of gradients."""
    training, counts = config.training, count_parameters(model)
    blocks = ceil(len(counts.blocks) / degrees.pp)
    ends: float = counts.total - sum(counts.blocks)
    if degrees.pp > 1:  # the first stage or the last
        ends = counts.head
    block, ends = max(counts.blocks) / degrees.tp, ends / degrees.tp
    number = blocks * block + ends
    if degrees.pp == 1:  # blocks may differ
        number = counts.total / degrees.tp
    wide, size = BYTES[training.dtype], BYTES[training.mixed_precision_param]
    shapes = _trained(model, config)
    # In a model with adapters only these are trained; the rest is stored in the precision it
    # computes in.
    share = sum(map(prod, shapes.values())) / counts.total
    narrow = NF4_BYTES if config.lora.base == "nf4" else size
    kept = number * wide
    if config.lora.rank:
        kept = number * share * wide + blocks * block * narrow + ends * size
    kept += number * state_bytes(config, shapes) / counts.total
    trained = number * share
    accumulates = _accumulates(config, degrees)
    if degrees.world_size == 1 and not training.enable_cpu_offload:
        # With split master weights, gradients have the precision of the pass unless several
        # accumulate.
        summed = BYTES[training.mixed_precision_reduce] if accumulates else size
        return kept, min(summed, wide) * trained
    shards = degrees.dp_shard * degrees.cp
    # The gradients of a pipeline's micro-batches accumulate unsharded, and are sharded at the end.
    gradients = wide * trained / shards
    if degrees.pp > 1:
        gradients = BYTES[training.mixed_precision_reduce] * trained
    # FSDP gathers the root for the whole step, and blocks when they are needed (two at a time).
    at_once = 2 if degrees.reshard_after_forward else blocks
    gathered = size * ends + narrow * at_once * block
    reducing = 2 * block * (size + BYTES[training.mixed_precision_reduce])
    if training.enable_cpu_offload:
        return gathered + reducing, 0.0
    return kept / shards + gathered + reducing, gradients


def _trained(model: Any, config: JobConfig) -> Shapes:
    return trained_parameters(model, config.lora, config.model.freeze)


def _accumulates(config: JobConfig, degrees: Degrees) -> bool:
    """Whether gradients accumulate over several passes, as those of a pipeline's micro-batches
    always do."""
    return degrees.pp > 1 or _rows_of_rank(config, degrees) > config.training.local_batch_size


def _rows_of_rank(config: JobConfig, degrees: Degrees) -> float:
    return rows_per_step(config.training, degrees.dp) / degrees.dp
