"""What follows from a config: parallel degrees for a world size, pipeline schedules and their
stages, the compute type, the learning rate and weight decay of each parameter. Does not import
torch."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from overland.config.schema import JobConfig, Optimizer, Parallelism, ParameterGroup, Training
from overland.errors import Kind, OverlandError

# Stages per rank, by pipeline schedule.
STAGES_PER_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}

# V-shaped schedules: rank 0 has the first and the last stage.
TURNING = {"ZBVZeroBubble", "DualPipeV"}

# Schedules that compute weight gradients separately from input gradients.
SPLIT_BACKWARD = {"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}


def model_name(config: JobConfig) -> str:
    return config.model.config or f"{config.model.name} {config.model.flavor}"


@dataclass(frozen=True)
class Degrees:
    """The parallel degrees of a run, for a given world size."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    reshard_after_forward: bool

    @property
    def dp(self) -> int:
        """The number of parts that the global batch is split into."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp


HALVES = ("float32", "bfloat16")  # stored in the first, computed in the second
COMPARED = ("dpo", "ipo")  # preference losses with a reference


def is_unsharded(config: JobConfig, degrees: Degrees) -> bool:
    """Whether a model runs without FSDP: on one device. Offloading, float16, and frozen weights
    stored in another dtype than that of computation are left to FSDP."""
    training, lora = config.training, config.lora
    kinds = (training.dtype, training.mixed_precision_param)
    is_cast = bool(lora.rank) and lora.base not in ("auto", "nf4", training.mixed_precision_param)
    plain = kinds == HALVES or (kinds[0] == kinds[1] and not is_cast)
    return degrees.world_size == 1 and not training.enable_cpu_offload and plain


def starts_as_base(config: JobConfig) -> bool:
    """Whether a model without its adapters is always the one it started from."""
    lora = config.lora
    return bool(lora.rank) and lora.adapter is None and not lora.modules_to_save


def keeps_reference(config: JobConfig) -> bool:
    """Whether the trained parameters exist twice: as they are, and as they were at the start."""
    settings, is_base = config.preference, starts_as_base(config)
    is_copy = settings.reference == "copy" or (settings.reference == "auto" and not is_base)
    return settings.loss in COMPARED and is_copy


class DegreeError(OverlandError, ValueError):
    """Raised when the degrees do not fit the world."""

    kind = Kind.CONFIG


def resolve_degrees(parallelism: Parallelism, world_size: int, ranks_per_node: int = 1) -> Degrees:
    """Resolves -1 and the sharding stage, and checks that the product equals the world size."""
    p = parallelism
    pp, cp, tp = p.pipeline_parallel_degree, p.context_parallel_degree, p.tensor_parallel_degree
    left = max(1, world_size // (pp * cp * tp))
    replicate, shard = _data_parallel(p, left, max(1, ranks_per_node // (pp * cp * tp)))
    degrees = Degrees(pp, replicate, shard, cp, tp, _reshards(p))
    if degrees.world_size != world_size:
        raise DegreeError(
            f"replicate {replicate} × shard {shard} × pipeline {pp} × context {cp} × tensor {tp} = "
            f"{degrees.world_size}, but there are {world_size} devices"
        )
    return degrees


def smallest_world(parallelism: Parallelism) -> int:
    """Returns the fewest devices that the degrees fit on."""
    p = parallelism
    data = p.data_parallel_replicate_degree * max(1, p.data_parallel_shard_degree)
    return data * p.pipeline_parallel_degree * p.context_parallel_degree * p.tensor_parallel_degree


def _data_parallel(p: Parallelism, dp: int, dp_per_node: int) -> tuple[int, int]:
    """Returns the replicate and shard degrees for `dp` data-parallel ranks."""
    stage = p.sharding_stage
    if stage == "zero0":
        return dp, 1
    if stage in ("zero2_hybrid", "zero3_hybrid"):
        shard = min(dp, dp_per_node)
        return dp // shard, shard
    if p.data_parallel_shard_degree == -1:
        return p.data_parallel_replicate_degree, max(1, dp // p.data_parallel_replicate_degree)
    return p.data_parallel_replicate_degree, p.data_parallel_shard_degree


def _reshards(p: Parallelism) -> bool:
    if p.sharding_stage is not None:
        return p.sharding_stage.startswith("zero3")
    if p.fsdp_reshard_after_forward == "default":
        return p.pipeline_parallel_degree == 1
    return p.fsdp_reshard_after_forward == "always"


def rows_per_step(training: Training, dp: int) -> int:
    """Returns the size of the global batch with `dp` data-parallel ranks."""
    size = training.global_batch_size
    return training.local_batch_size * dp if size == -1 else size


def resolve_dtype(config: JobConfig, device_type: str) -> JobConfig:
    """Returns the config with the data type `auto` resolved. On a CPU without bfloat16
    instructions, bfloat16 was 200 times slower than float32."""
    if config.training.mixed_precision_param != "auto":
        return config
    dtype = "bfloat16" if device_type == "cuda" else "float32"
    return config.having({"training.mixed_precision_param": dtype})


@dataclass(frozen=True)
class GroupRates:
    """The rates of a parameter group."""

    lr_factor: float
    weight_decay: float


def recomputes_some_split_blocks(config: JobConfig) -> bool:
    """Returns whether every n-th block is recomputed while tensor parallelism splits its
    matrices."""
    recompute = config.activation_checkpoint
    by_number = recompute.mode == "selective" and recompute.selective_ac_option != "op"
    return by_number and config.parallelism.tensor_parallel_degree > 1


def optimizer_settings(config: JobConfig) -> Optimizer:
    """Returns the optimizer settings, with LoRA+'s learning rate as the last group."""
    settings, ratio = config.optimizer, config.lora.lr_ratio
    if not config.lora.rank or ratio == 1:
        return settings
    own = ParameterGroup(pattern="*.lora_B.weight", lr_factor=ratio)
    return settings.model_copy(update={"groups": [*settings.groups, own]})


def group_rates(name: str, num_dims: int, settings: Optimizer) -> GroupRates:
    """Returns the rates of the first group whose pattern matches. Unless a group says otherwise,
    matrices and embeddings decay; norms and biases (anything with one dimension) do not."""
    decay = settings.weight_decay if num_dims >= 2 else 0.0
    for group in settings.groups:
        if fnmatchcase(name, group.pattern):
            given = group.weight_decay
            return GroupRates(group.lr_factor, decay if given is None else given)
    return GroupRates(1.0, decay)
