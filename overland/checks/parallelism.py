"""Checks that the degrees multiply to the number of devices and agree with the ZeRO shorthand, and
that model, rows and batches divide evenly among axes, ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm, prod

from overland.config.derived import STAGES_PER_RANK, TURNING, smallest_world
from overland.config.errors import Problem
from overland.config.load import Loaded
from overland.config.schema import JobConfig, Parallelism
from overland.data.plan import LENGTH_STEP
from overland.errors import ModelError
from overland.models.flops import stage_costs
from overland.models.registry import model_config
from overland.parallel.plans import plan_for, without_plan
from overland.words import any_of

# Short names for the sentence, in the order of the mesh (slowest axis first).
AXES = {
    "pipeline_parallel_degree": "pipeline",
    "data_parallel_replicate_degree": "replicate",
    "data_parallel_shard_degree": "shard",
    "context_parallel_degree": "context",
    "tensor_parallel_degree": "tensor",
}
SHARD = "data_parallel_shard_degree"
REPLICATE = "data_parallel_replicate_degree"


def check_degrees(loaded: Loaded, world_size: int | None) -> Iterator[Problem]:
    """Checks that the degrees multiply to the number of devices and agree with the ZeRO
    shorthand."""
    degrees = {axis: getattr(loaded.config.parallelism, axis) for axis in AXES}
    if degrees[SHARD] != -1 and degrees[SHARD] < 1:
        message = "expected -1 (all remaining devices) or a positive whole number"
        yield loaded.problem(f"parallelism.{SHARD}", message)
        return
    if clash := _stage_against_degrees(loaded.config.parallelism):
        yield loaded.problem("parallelism.sharding_stage", f"{clash}; remove one of the two")
    if world_size is not None:
        yield from _product(loaded, degrees, world_size)


def check_splits(loaded: Loaded) -> Iterator[Problem]:
    """Checks that every axis divides the model evenly."""
    layout = loaded.config.parallelism
    tp, cp = layout.tensor_parallel_degree, layout.context_parallel_degree
    pp = layout.pipeline_parallel_degree
    model = model_config(loaded.config.model)
    if max(tp, cp, pp) == 1:
        return
    lacking = without_plan(model, loaded.config.model.name, tp=tp, cp=cp)
    for axis, name in (("tp", "tensor"), ("cp", "context")):
        if axis in lacking:
            yield loaded.problem(f"parallelism.{name}_parallel_degree", lacking[axis])
    plan = plan_for(model)
    if plan is not None and (uneven := plan.uneven(model, tp)):
        message = f"does not divide {any_of(uneven, 'and')}"
        yield loaded.problem("parallelism.tensor_parallel_degree", message)
    if pp == 1:
        return
    schedule, message = layout.pipeline_parallel_schedule, ""
    stages = pp * STAGES_PER_RANK[schedule]
    try:
        blocks = len(stage_costs(model).blocks)
        if stages > blocks:
            message = f"{schedule} needs {stages} stages, but the model has only {blocks} layers"
    except ModelError as error:
        message = f"{loaded.config.model.name}: {error}"
    if message:
        yield loaded.problem("parallelism.pipeline_parallel_degree", message)


def check_lengths(loaded: Loaded) -> Iterator[Problem]:
    """Checks that rows are split evenly, in training and in validation. A context rank would drop
    the remaining tokens, and a pipeline takes rows of one length only."""
    layout = loaded.config.parallelism
    pieces = pieces_of_row(layout)
    lengths = {"training.seq_len": loaded.config.training.seq_len}
    validation = loaded.config.validation
    if validation.enable and validation.seq_len is not None:
        lengths["validation.seq_len"] = validation.seq_len
    for key, length in lengths.items():
        if length % pieces:
            names = ("context_parallel_degree", "tensor_parallel_degree")
            degrees = [f"{name} = {n}" for name in names if (n := getattr(layout, name)) > 1]
            nearest = max(1, round(length / pieces)) * pieces
            message = (
                f"with {any_of(degrees, 'and')} it must be a multiple of {pieces}; the nearest is "
                f"{nearest}"
            )
            yield loaded.problem(key, message)
        elif layout.pipeline_parallel_degree > 1 and length != lengths["training.seq_len"]:
            message = (
                "a pipeline takes rows of one length only; remove it, or set it to "
                f"{lengths['training.seq_len']}, the value of training.seq_len"
            )
            yield loaded.problem(key, message)


def pieces_of_row(layout: Parallelism) -> int:
    """Returns the number of equal pieces that rows are split into: context parallelism splits a row
    into 2·cp, tensor parallelism a rank's part of it into tp."""
    tp, cp = layout.tensor_parallel_degree, layout.context_parallel_degree
    return lcm(2 * cp, cp * tp) if cp > 1 else tp


def check_grouping(loaded: Loaded) -> Iterator[Problem]:
    """Checks that batches cut to their longest row can be split like any other."""
    data, layout = loaded.config.data, loaded.config.parallelism
    if not data.group_by_length:
        return
    pieces, message = pieces_of_row(layout), ""
    if data.packing not in ("trunc", "overflow"):
        message = f'data.packing = "{data.packing}" leaves no padding to save; set it to "trunc"'
    elif layout.pipeline_parallel_degree > 1:
        message = "a pipeline takes sequences of one length only"
    elif LENGTH_STEP % pieces:
        message = (
            f"sequence lengths are multiples of {LENGTH_STEP} tokens, which tensor and context "
            f"parallelism cannot split into {pieces} parts"
        )
    if message:
        yield loaded.problem("data.group_by_length", message)


def check_microbatches(loaded: Loaded, world_size: int | None) -> Iterator[Problem]:
    """Checks that a pipeline has enough micro-batches, and a number that its schedule allows."""
    layout, training = loaded.config.parallelism, loaded.config.training
    pp, schedule = layout.pipeline_parallel_degree, layout.pipeline_parallel_schedule
    if pp == 1:
        return
    rows = training.local_batch_size
    if training.global_batch_size != -1:
        devices = world_size or smallest_world(layout)  # on more, a rank has fewer sequences
        degree = data_parallel_degree(loaded.config, devices)
        rows = training.global_batch_size // degree if degree else rows
    size, message = layout.pipeline_parallel_microbatch_size, ""
    count = rows // size
    least = 2 * pp if schedule in TURNING else pp
    if rows % size:
        message = f"does not divide the {rows} sequences of a data-parallel rank"
    elif count < least:
        message = (
            f"{rows} sequences per data-parallel rank make {count} micro-batches; {schedule} needs "
            f"at least {least}"
        )
    elif schedule.startswith("Interleaved") and count % (count // pp):
        message = f"{schedule} needs a multiple of {pp} micro-batches, not {count}"
    if message:
        yield loaded.problem("parallelism.pipeline_parallel_microbatch_size", message)


def data_parallel_degree(config: JobConfig, world_size: int) -> int | None:
    """Returns the number of ranks that see different data (replicate × shard); None if the degrees
    do not fit."""
    layout = config.parallelism
    others = (
        layout.tensor_parallel_degree
        * layout.pipeline_parallel_degree
        * layout.context_parallel_degree
    )
    return world_size // others if world_size % others == 0 else None


def _stage_against_degrees(layout: Parallelism) -> str:
    """Returns how the ZeRO shorthand contradicts another key; empty if it does not."""
    stage = layout.sharding_stage
    if stage is None:
        return ""
    shard, replicate = layout.data_parallel_shard_degree, layout.data_parallel_replicate_degree
    reshard = layout.fsdp_reshard_after_forward
    if stage == "zero0" and shard > 1:
        return f"replicates everything, but {SHARD} = {shard} shards"
    if stage.endswith("_hybrid") and max(shard, replicate) > 1:
        given = f"{SHARD} = {shard}" if shard > 1 else f"{REPLICATE} = {replicate}"
        return f"sets the degrees itself, within and across nodes, but {given} is set too"
    if stage != "zero0" and shard == 1:
        return f"shards, but {SHARD} = 1 does not"
    if stage in ("zero2", "zero3") and replicate > 1:
        return f"has one replica, but {REPLICATE} = {replicate} has more ({stage}_hybrid does so)"
    if stage.startswith("zero2") and reshard == "always":
        return 'keeps parameters gathered, but fsdp_reshard_after_forward = "always" does not'
    if stage.startswith("zero3") and reshard == "never":
        return 'frees gathered parameters, but fsdp_reshard_after_forward = "never" does not'
    return ""


def _product(loaded: Loaded, degrees: dict[str, int], world_size: int) -> Iterator[Problem]:
    stage = loaded.config.parallelism.sharding_stage
    free = {SHARD} if degrees[SHARD] == -1 else set()
    if stage == "zero0" or (stage and stage.endswith("_hybrid")):
        free = {SHARD, REPLICATE}  # the shorthand determines both
    fixed = {axis: degree for axis, degree in degrees.items() if axis not in free}
    product = prod(fixed.values())
    if product == world_size or (free and world_size % product == 0):
        return
    named = " × ".join(f"{AXES[axis]} {degree}" for axis, degree in fixed.items() if degree > 1)
    detail = f" ({named})" if " × " in named else ""
    devices = "1 device" if world_size == 1 else f"{world_size} devices"
    relation = "which does not divide" if free else "but there are"
    axis, fitting = _way_out(fixed, world_size, bool(free))
    way_out = f"; parallelism.{axis} = {fitting} would fit" if axis else ""
    blamed = axis if axis and axis in fixed else max(fixed, key=lambda name: fixed[name])
    message = f"the degrees multiply to {product}{detail}, {relation} {devices}{way_out}"
    yield loaded.problem(f"parallelism.{blamed}", message)


def _way_out(fixed: dict[str, int], world_size: int, room: bool) -> tuple[str | None, int]:
    """Returns one degree to change, and its new value, so that the product fits. Data parallelism
    comes first, since it works with any model."""
    order = [SHARD, REPLICATE, "tensor_parallel_degree", "context_parallel_degree"]
    found: list[tuple[int, int, str, int]] = []  # the smallest change is best
    for rank, axis in enumerate([*order, "pipeline_parallel_degree"]):
        if axis not in fixed or (fixed[axis] == 1 and axis not in (SHARD, REPLICATE)):
            continue
        others = prod(degree for name, degree in fixed.items() if name != axis)
        if world_size % others:
            continue
        share = world_size // others
        if not room:
            return axis, share
        fitting = _largest_divisor(share, fixed[axis])
        if fitting != fixed[axis]:
            found.append((abs(fixed[axis] - fitting), rank, axis, fitting))
    return min(found)[2:] if found else (None, 0)


def _largest_divisor(number: int, most: int) -> int:
    return max(n for n in range(1, min(number, most) + 1) if number % n == 0)


def check_batch(loaded: Loaded, world_size: int | None) -> Iterator[Problem]:
    """Checks that the global batch is a whole number of local batches on every device."""
    training = loaded.config.training
    size, local = training.global_batch_size, training.local_batch_size
    key = "training.global_batch_size"
    if size == 0:
        message = "expected -1 (one local batch per data-parallel device) or a positive number"
        yield loaded.problem(key, message)
        return
    degree = data_parallel_degree(loaded.config, world_size) if world_size else None
    if size < 0 or degree is None or size % (local * degree) == 0:
        return
    unit = local * degree
    below, above = size // unit * unit, (size // unit + 1) * unit
    nearest = f"the nearest are {below} and {above}" if below else f"the least is {above}"
    if size % degree == 0:  # as other trainers do: the local batch is an upper bound
        fitting = _largest_divisor(size // degree, local)
        sizes = f"{below} or {above}" if below else above
        nearest = f"training.local_batch_size = {fitting} keeps {size}, or set {key} = {sizes}"
    message = (
        f"expected a multiple of {unit} (local_batch_size {local} × data-parallel degree "
        f"{degree}); {nearest}"
    )
    yield loaded.problem(key, message)
