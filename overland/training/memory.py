"""Estimates the peak memory of a training step on one device, from shapes alone (no torch).

The state (parameters and optimizer state) lives through the whole step. The peak adds to it the
worst of these moments:

    head       everything that blocks keep for the backward pass, and the logits of one chunk
    block      the same, and the intermediate tensors of the backward pass that comes first
    last       the gradients of all blocks, and what the backward pass that comes last takes
    embedding  what gradients there are by then (shards, if sharded), and the embedding's own
    reduce     FSDP's buffers for the gradients of what is outside the blocks

On one device the estimate is within 1 % of measurements for 1B to 8B parameters, 8 k to 64 k
tokens, bfloat16 and 8 bits, adapters on 16-bit and 4-bit weights, compiled or not, and within 2 %
if every block is recomputed; for 1B on four ranks within 1 %, in each kind of parallelism and some
of their combinations (tests/planner/test_memory.py, docs/evidence/gpu_memory.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from operator import mul
from typing import Any

from overland.config.derived import (
    STAGES_PER_RANK,
    Degrees,
    is_unsharded,
    keeps_reference,
    rows_per_step,
)
from overland.config.schema import JobConfig
from overland.models.config import EMBEDDING, HEAD
from overland.models.flops import (
    Shapes,
    count_parameters,
    outline_of,
    own_method,
    stage_costs,
    sum_by_block,
    trained_parameters,
)
from overland.models.structure import Activations, PassShape, inside
from overland.optimizers.registry import state_bytes
from overland.optimizers.rule import BYTES

RECOMPUTE = ("none", "selective", "full")  # from the fastest to the one that needs least memory
WORKSPACE = 2 * 2**25  # of cuBLAS and cuBLASLt, on Hopper GPUs
NF4_BYTES = 1 / 2 + 2 / 64  # of a weight in 4 bits, with its share of a scale (kernels/nf4.py)


@dataclass(frozen=True)
class StepMemory:
    """The bytes of a step on one device."""

    state: float
    gradients: float
    kept: float  # by the blocks, from the forward to the backward pass
    moments: Mapping[str, float]  # beside the state
    workspace: float = WORKSPACE

    @property
    def peak(self) -> float:
        return self.state + self.workspace + max(self.moments.values())


@dataclass(frozen=True)
class Share:
    """What a rank holds of the model, in numbers of parameters."""

    num_blocks: int
    block: float  # the largest
    blocks: float
    embedding: float
    head: float  # of its own: not on the rank that has a tied embedding
    others: float  # such as the last norm
    computes_loss: bool
    blocks_kept: int  # whose activations live at a time, each counted once per micro-batch

    @property
    def ends(self) -> float:
        return self.embedding + self.head + self.others

    @property
    def number(self) -> float:
        return self.blocks + self.ends

    def split(self, tp: int) -> Share:
        sizes = ("block", "blocks", "embedding", "head", "others")
        return replace(self, **{name: getattr(self, name) / tp for name in sizes})


def can_estimate(model: Any) -> bool:
    """Whether the class of the model's config defines `activations` and its blocks are known."""
    return own_method(model, "activations") is not None and bool(count_parameters(model).blocks)


def step_memory(
    model: Any,
    config: JobConfig,
    degrees: Degrees,
    recompute: str,
    compiled: bool,
    kernels: bool = True,
) -> StepMemory:
    """Estimates a step of a model whose config has `activations` (see models/structure.py).
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
    shares = shares_of(model, config, degrees)
    memories = [memory_of(share, made, model, config, degrees) for share in shares]
    return max(memories, key=lambda memory: memory.peak)


def shares_of(model: Any, config: JobConfig, degrees: Degrees) -> list[Share]:
    """Returns what each rank of a pipeline holds."""
    counts, tp, pp = count_parameters(model), degrees.tp, degrees.pp
    outside = counts.total - sum(counts.blocks)
    embedding = min(counts.input_embedding or counts.head, outside)
    if pp == 1:
        numbers, is_tied = counts.blocks, outside < embedding + counts.head
        keep = len(numbers) - first_trained(model, config)
        head = 0 if is_tied else counts.head
        others = outside - embedding - head
        count, most, all_blocks = len(numbers), max(numbers), sum(numbers)
        return [Share(count, most, all_blocks, embedding, head, others, True, keep).split(tp)]
    from overland.parallel.pipeline import deal_blocks, micro_batches_kept, stages_of_rank

    layout = config.parallelism
    schedule, rows = layout.pipeline_parallel_schedule, layout.pipeline_parallel_microbatch_size
    num_stages = pp * STAGES_PER_RANK[schedule]
    dealt = deal_blocks(stage_costs(model), num_stages)
    count = max(1, int(_rows_of_rank(config, degrees)) // rows)
    shares = []
    for rank, combinations in enumerate(micro_batches_kept(schedule, pp, count)):
        stages = stages_of_rank(rank, pp, schedule)
        numbers = tuple(counts.blocks[block] for stage in stages for block in dealt[stage])
        first, last = 0 in stages, num_stages - 1 in stages
        # The last stage has a copy of a tied matrix.
        ends = embedding * first, counts.head * last, 0
        kept = max(
            sum(map(mul, some, (len(dealt[one]) for one in stages))) for some in combinations
        )
        share = Share(len(numbers), max(numbers), sum(numbers), *ends, last, kept)
        shares.append(share.split(tp))
    return shares


def memory_of(
    share: Share, made: Activations, model: Any, config: JobConfig, degrees: Degrees
) -> StepMemory:
    training, shapes = config.training, _trained(model, config)
    wide, size = BYTES[training.dtype], BYTES[training.mixed_precision_param]
    summed = BYTES[training.mixed_precision_reduce]
    total = count_parameters(model).total
    trained_share = sum(map(prod, shapes.values())) / total
    trained = share.number * trained_share
    # In a model with adapters only these are trained; the rest is stored in the precision it
    # computes in.
    at_rest = BYTES.get(config.lora.base, size)
    narrow = NF4_BYTES if config.lora.base == "nf4" else at_rest if config.lora.rank else size
    state = share.number * (wide + state_bytes(config, shapes) / total)
    if config.lora.rank:
        base = share.blocks * narrow + share.ends * at_rest
        state = trained * wide + base + share.number * state_bytes(config, shapes) / total
    if keeps_reference(config):  # of the parameters as they are stored
        state += trained * (size if is_unsharded(config, degrees) else wide)
    accumulates = degrees.pp > 1 or _rows_of_rank(config, degrees) > training.local_batch_size
    kept = share.blocks_kept * made.kept
    loss = made.head if share.computes_loss else 0.0
    trains_ends = not {EMBEDDING, HEAD}.isdisjoint(shapes)
    output = share.head or (share.embedding if share.computes_loss else 0.0)
    output_gradient = size * output * trains_ends  # from the loss to the end of the backward pass

    if is_unsharded(config, degrees):
        # With split master weights, gradients have the precision of the pass unless several
        # accumulate.
        gradients = min(summed if accumulates else size, wide) * trained
        before = gradients if accumulates else 0.0
        # An embedding's gradient comes after the first block; a tied one is added to the output's.
        embedded = size * share.embedding * trains_ends
        beside = output_gradient if accumulates else -embedded if share.head else 0.0
        moments = {
            "head": before + kept + loss,
            "block": before + kept + output_gradient + made.block,
            "last": gradients + beside + made.block,
            "embedding": gradients + (0.0 if share.head else embedded),
        }
        return StepMemory(state, gradients, kept, moments)

    # What FSDP allocates in torch 2.11 to 2.13. The root is gathered for the whole step, blocks
    # when they are needed; the buffer of the last gather lives until the next one. Gradients of
    # earlier passes are whole, and as wide as their sum.
    shards = degrees.dp_shard * degrees.cp
    root, one = size * share.ends, narrow * share.block
    gathered = root + (0.0 if degrees.reshard_after_forward else narrow * share.blocks)
    before = summed * trained if accumulates else 0.0
    ends = share.ends * trains_ends
    block = (trained - ends) / share.num_blocks
    sharded = 0.0 if training.enable_cpu_offload else wide * (trained - ends) / shards
    embedded = share.embedding * trains_ends
    of_ends = size * embedded + output_gradient
    if degrees.tp > 1 and share.computes_loss and not share.head:
        of_ends += size * embedded  # DTensor adds up a tied matrix's gradients in a third tensor
    if accumulates:
        of_ends += summed * (ends + embedded)
    narrow_sum = (summed if accumulates else size) + summed  # copied into the buffer of the sum
    copies = 3 if shards == 1 else 1 + 1 / shards
    moments = {
        "head": gathered + (one if shards > 1 else 0.0) + before + kept + loss,
        "block": max(gathered, root + 2 * one) + before + kept + output_gradient
        + size * block + made.block,
        "embedding": root + sharded + of_ends + summed * block,
        "reduce": sharded + max(narrow_sum, copies * summed) * ends,
    }  # fmt: skip
    offloaded = training.enable_cpu_offload
    return StepMemory(0.0 if offloaded else state / shards, wide * trained / shards, kept, moments)


def first_trained(model: Any, config: JobConfig) -> int:
    """Returns the number of the first block that keeps something for the backward pass, which goes
    no further than to the first trained parameter."""
    (structure, shapes), trained = outline_of(model), _trained(model, config)
    if any(inside(name, structure.first_stage) for name in trained):
        return 0
    numbers = sum_by_block(structure, dict.fromkeys(shapes, 0) | dict.fromkeys(trained, 1))
    return next((block for block, number in enumerate(numbers) if number), len(numbers))


def _trained(model: Any, config: JobConfig) -> Shapes:
    return trained_parameters(model, config.lora, config.model.freeze)


def _rows_of_rank(config: JobConfig, degrees: Degrees) -> float:
    return rows_per_step(config.training, degrees.dp) / degrees.dp
