"""Memory of a device at the peak of a training step, from shapes alone (no torch).

What lives through a step is the state: parameters, and what the optimizer keeps of them. Beside it,
at the worst of three moments, lies

    head     everything that blocks keep for the backward pass, and the logits of one chunk
    block    the same, and what the backward pass of the first block makes
    update   all gradients, and nothing of the above

On one device it is within 1 % of what was measured for 1B to 8B parameters, 8 k to 64 k tokens,
bfloat16 and 8 bits, compiled or not, and within 3 % where every block is recomputed
(tests/planner/test_memory.py). For several devices it follows the same counting and has not been
compared with a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from operator import mul

from overland.config.degrees import Degrees
from overland.config.schedules import STAGES_PER_RANK
from overland.config.schema import JobConfig
from overland.models.config import DecoderConfig
from overland.models.flops import count_parameters
from overland.optimizers.registry import state_bytes

SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
RECOMPUTE = ("none", "selective", "full")  # from the fastest to the smallest
# The rest is the driver's, the libraries' and the allocator's: an 8B step that is counted as 91 %
# of an H200 runs there.
USABLE = 0.94
KERNEL_CHUNK, PLAIN_CHUNK = 8192, 2048  # tokens whose logits exist at a time, see models/loss.py


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one device."""

    state: float
    gradients: float
    kept: float  # by the blocks, from the forward to the backward pass
    head: float
    block: float  # what one block's backward pass makes
    accumulates: bool  # gradients live through all passes of a step

    @property
    def peak(self) -> float:
        passing = max(self.kept + self.head, self.kept + self.block)
        if self.accumulates:
            return self.state + self.gradients + passing
        return self.state + max(passing, self.gradients + self.block)


def least_recompute(
    model: DecoderConfig,
    config: JobConfig,
    degrees: Degrees,
    device_bytes: int,
    compiled: bool,
    kernels: bool = True,
) -> tuple[str, StepMemory]:
    """The first of RECOMPUTE that fits the device, or the last if none does."""
    for recompute in RECOMPUTE:
        memory = step_memory(model, config, degrees, recompute, compiled, kernels)
        if memory.peak <= USABLE * device_bytes:
            break
    return recompute, memory


def step_memory(
    model: DecoderConfig,
    config: JobConfig,
    degrees: Degrees,
    recompute: str,
    compiled: bool,
    kernels: bool = True,
) -> StepMemory:
    """`recompute` is one of RECOMPUTE (selective: by operator); `kernels`: our own take part, as on
    NVIDIA GPUs."""
    training, tp, pp = config.training, degrees.tp, degrees.pp
    size = SIZES[training.mixed_precision_param]
    rows = training.local_batch_size
    if pp > 1:
        rows = config.parallelism.pipeline_parallel_microbatch_size
    tokens = rows * training.seq_len // degrees.cp
    matrix = model.vocab_size * model.hidden_size / tp

    per_token = kept_per_token(model, config, degrees, recompute, compiled)
    whole = kept_per_token(model, config, degrees, "none", compiled)
    chunk = min(tokens, KERNEL_CHUNK) * size if kernels else min(tokens, PLAIN_CHUNK) * (size + 8)
    hidden = tokens * model.hidden_size * size / tp
    state, gradients = _state(model, config, degrees)
    return StepMemory(
        state,
        gradients,
        kept=layers_kept(model, config, degrees) * tokens * per_token,
        # The gradient of the output matrix is added up in float32; and the last norm's input and
        # output, and the gradient of the latter.
        head=chunk * model.vocab_size / tp + 4 * matrix + 3 * hidden,
        # Gradients of gate, up and their product; what is computed again; the output matrix's
        # gradient, narrow by now.
        block=tokens * (3 * size * model.intermediate_size / tp + whole - per_token)
        + size * matrix
        + 2 * hidden,
        accumulates=_accumulates(config, degrees),
    )


def layers_kept(model: DecoderConfig, config: JobConfig, degrees: Degrees) -> int:
    """Blocks whose values are kept at a time, each counted once per micro-batch that is under way;
    of a pipeline, on the rank that keeps the most."""
    pp, layout = degrees.pp, config.parallelism
    if pp == 1:
        return model.num_hidden_layers
    from overland.parallel.pipeline import deal_layers, micro_batches_kept, stages_of_rank

    schedule = layout.pipeline_parallel_schedule
    shares = deal_layers(model, pp * STAGES_PER_RANK[schedule])
    count = int(_rows_of_rank(config, degrees)) // layout.pipeline_parallel_microbatch_size
    most = 0
    for rank, combinations in enumerate(micro_batches_kept(schedule, pp, max(1, count))):
        layers = [len(shares[number]) for number in stages_of_rank(rank, pp, schedule)]
        most = max(most, *(sum(map(mul, counts, layers)) for counts in combinations))
    return most


def kept_per_token(
    model: DecoderConfig, config: JobConfig, degrees: Degrees, recompute: str, compiled: bool
) -> float:
    """Bytes per token and block that are kept for its backward pass."""
    size, tp = SIZES[config.training.mixed_precision_param], degrees.tp
    width, inner = model.hidden_size, model.intermediate_size / tp
    q = model.num_attention_heads * model.head_dim / tp
    kv = model.num_key_value_heads * model.head_dim / tp
    if recompute == "full":
        return size * width / tp
    # Queries, keys, values, the output, and a number per head; gate and up.
    outputs = size * (2 * q + 2 * kv * degrees.cp + 2 * inner)
    outputs += 4 * model.num_attention_heads / tp
    residuals = size * 2 * width / tp
    if recompute == "selective":
        return outputs + residuals + (0 if compiled else size * width / tp)

    if config.training.float8 == "off":  # both norms' outputs, and silu(gate) · up
        inputs = size * (2 * width + inner)
    else:  # in 8 bits, attention's output once more; uncompiled, each product casts for itself
        inputs = (2 if compiled else 5) * width + inner + q
    if model.qk_norm:
        outputs += size * (q + kv)
    if not compiled:  # norms keep a float32 and a rounded input, silu(gate) is kept too
        residuals = 2 * (4 + size) * width / tp
        outputs += size * inner
    return outputs + residuals + inputs


def _state(model: DecoderConfig, config: JobConfig, degrees: Degrees) -> tuple[float, float]:
    """Bytes of parameters and optimizer state, and bytes of gradients."""
    training, counts = config.training, count_parameters(model)
    layers = ceil(model.num_hidden_layers / degrees.pp)
    ends: float = counts.total - model.num_hidden_layers * counts.per_layer
    if degrees.pp > 1:  # the first stage or the last
        ends = counts.head
    layer, ends = counts.per_layer / degrees.tp, ends / degrees.tp
    number = layers * layer + ends
    wide, size = SIZES[training.dtype], SIZES[training.mixed_precision_param]
    moments = state_bytes(config, model.parameter_shapes()) / counts.total
    accumulates = _accumulates(config, degrees)
    if degrees.world_size == 1 and not training.enable_cpu_offload:
        # Kept in halves, gradients are as narrow as the pass unless several add up.
        summed = SIZES[training.mixed_precision_reduce] if accumulates else size
        return (wide + moments) * number, min(summed, wide) * number
    shards = degrees.dp_shard * degrees.cp
    # The gradients of a pipeline's micro-batches are added up whole, and shared out at the end.
    gradients = wide * number / shards
    if degrees.pp > 1:
        gradients = SIZES[training.mixed_precision_reduce] * number
    # FSDP: the root is gathered for the whole step, blocks for their turn (two at a time).
    gathered = size * (ends + 2 * layer) if degrees.reshard_after_forward else size * number
    reducing = 2 * layer * (size + SIZES[training.mixed_precision_reduce])
    if training.enable_cpu_offload:
        return gathered + reducing, 0.0
    return (wide + moments) * number / shards + gathered + reducing, gradients


def _accumulates(config: JobConfig, degrees: Degrees) -> bool:
    """Whether gradients of several passes add up. Those of a pipeline's micro-batches always do."""
    return degrees.pp > 1 or _rows_of_rank(config, degrees) > config.training.local_batch_size


def _rows_of_rank(config: JobConfig, degrees: Degrees) -> float:
    training = config.training
    if training.global_batch_size == -1:
        return training.local_batch_size
    return training.global_batch_size / degrees.dp
