"""The order in which a model is made parallel, and what is refused: degrees that it cannot be split
over, blocks that share parameters, batch normalization. Each line changes the model in place.

Linear layers are transformed before anything else looks at them. Context parallelism changes
attention's core, which works on a tensor-parallel rank's own heads. Activation checkpointing wraps
blocks, and torch.compile sees what is recomputed. Sharding comes last: its hooks run outside
compiled code. The model itself describes its blocks (models/structure.py); its plan defines how
matrices and rows are split (plans/).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from overland.config.derived import Degrees, rows_per_step
from overland.config.schema import JobConfig
from overland.errors import ModelError
from overland.models.build import build_undivided
from overland.models.flops import stage_costs
from overland.models.inner import InnerLoss, Statistic
from overland.models.structure import blocks_of, find_module, inside, structure_of
from overland.parallel.blocks import checkpoint_activations, compile_blocks
from overland.parallel.mesh import Mesh
from overland.parallel.pipeline import Pipeline, deal_blocks, keep_stage, stages_of_rank
from overland.parallel.plans import ParallelPlan, plan_for, without_plan
from overland.parallel.sharding import shard
from overland.parallel.whole import Replayed, Whole, can_replay

ParallelModel = Whole | Pipeline
BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def build_parts(architecture: Any, mesh: Mesh, config: JobConfig) -> list[nn.Module]:
    """Builds this rank's part of the model on the meta device; with some schedules, that is two
    stages."""
    with torch.device("meta"):
        if mesh.degrees.pp > 1:
            parts = build_stages(architecture, mesh, config)
        else:
            parts = [build_undivided(architecture, config)]
            require_splittable(parts[0], architecture, mesh.degrees)
    for part in parts:
        require_no_batch_norm(part, config, mesh.degrees)
        parallelize(part, plan_for(architecture), mesh, config)
    return parts


def parallelize(model: nn.Module, plan: ParallelPlan | None, mesh: Mesh, config: JobConfig) -> None:
    """Makes a model, or one pipeline stage of it, parallel. A model that does not describe its
    blocks is sharded as a whole."""
    structure = structure_of(model)
    blocks = list(blocks_of(model).values())
    if mesh.degrees.tp > 1:
        assert plan is not None
        overlap = config.parallelism.enable_async_tensor_parallel
        plan.split_tensors(model, mesh.parameters["tp"], overlap)
    if mesh.degrees.cp > 1:
        assert plan is not None
        plan.split_context(model, mesh.axis("cp"))
    if blocks:
        compiled_and_split = bool(config.compile.enable) and mesh.degrees.tp > 1
        checkpoint_activations(
            blocks, config.activation_checkpoint, structure.random, compiled_and_split
        )
        compile_blocks(model, config.compile)
    shard(model, blocks, mesh, config)


def require_splittable(model: nn.Module, architecture: Any, degrees: Degrees) -> None:
    """Raises if a model cannot be split over the given degrees."""
    name, plan = type(model).__name__, plan_for(architecture)
    for problem in without_plan(architecture, name, tp=degrees.tp, cp=degrees.cp).values():
        raise ModelError(problem)
    if plan is not None and degrees.tp * degrees.cp > 1:
        plan.check(model, degrees)
    if degrees.cp > 1 and any(isinstance(one, InnerLoss) for one in model.modules()):
        raise ModelError(
            f"{name} has an inner loss, which is computed row by row (models/inner.py), but "
            f"cp = {degrees.cp} splits rows: train it without context parallelism"
        )
    if degrees.tp > 1 and any(isinstance(one, Statistic) for one in model.modules()):
        raise ModelError(
            f"{name} has an inner loss or statistic (models/inner.py), but tp = {degrees.tp} "
            "splits what it sees: train it without tensor parallelism"
        )
    if degrees.world_size > 1:
        require_blocks_apart(model)


def require_blocks_apart(model: nn.Module) -> None:
    """Raises if blocks share a module or parameter, which would be split twice, or trained
    separately by two stages."""
    structure = structure_of(model)
    block_of: dict[nn.Module, str] = {}
    for path in structure.blocks:
        blocks = find_module(model, path)
        assert blocks is not None
        for number, block in blocks._modules.items():  # includes a block that occurs twice
            block_name = f"{path}.{number}"
            for name, module in block.named_modules() if block is not None else ():
                other = block_of.setdefault(module, block_name)
                if other != block_name and any(True for _ in module.parameters()):
                    raise ModelError(
                        f"{other} and {block_name} share one module, {name or 'the whole block'}; "
                        "a model with shared blocks trains on one device only"
                    )
    names = set(block_of.values())
    for tied, owner in structure.ties.items():
        homes = [next((one for one in names if inside(path, (one,))), "") for path in (tied, owner)]
        if homes[0] != homes[1]:
            raise ModelError(
                f"{tied} and {owner} are one parameter, shared by a block and a module outside it; "
                "a model with such a tie trains on one device only"
            )


def require_no_batch_norm(model: nn.Module, config: JobConfig, degrees: Degrees) -> None:
    """Raises if a module normalizes over the rows of a pass, and a batch has others too."""
    training, parallelism = config.training, config.parallelism
    rows = rows_per_step(training, degrees.dp)
    is_piped = degrees.pp > 1
    together = training.local_batch_size
    together = parallelism.pipeline_parallel_microbatch_size if is_piped else together
    if rows > together and (name := batch_norm(model)):
        raise ModelError(
            f"{type(model).__name__}: {name} normalizes over the {together} rows of a pass, and a "
            f"batch has {rows}, so the split would change what is trained: use a norm of single "
            "rows (layer, group or RMS norm), or one that is frozen (eval()), or train on one "
            f"device with training.local_batch_size = {rows}"
        )


def batch_norm(model: nn.Module) -> str:
    """Returns the first module that normalizes over the rows of a pass; empty if none does."""
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and (module.training or module.running_mean is None):
            return f"{name} ({type(module).__name__})"
    return ""


def build_stages(architecture: Any, mesh: Mesh, config: JobConfig) -> list[nn.Module]:
    schedule = config.parallelism.pipeline_parallel_schedule
    numbers = stages_of_rank(mesh.rank("pp"), mesh.degrees.pp, schedule)
    num_stages = mesh.degrees.pp * len(numbers)
    shares = deal_blocks(stage_costs(architecture), num_stages)
    stages = []
    for number in numbers:
        stage = build_undivided(architecture, config)
        require_splittable(stage, architecture, mesh.degrees)
        keep_stage(stage, shares[number], first=number == 0, last=number == num_stages - 1)
        stages.append(stage)
    return stages


def build_parallel_model(
    parts: Sequence[nn.Module],
    mesh: Mesh,
    config: JobConfig,
    rows_per_rank: int,
    device: torch.device,
    num_sums: int = 1,
) -> ParallelModel:
    """Returns the allocated parts as a model, ready for batches of `rows_per_rank` rows.
    `num_sums`: the number of sums that the objective computes, including the loss."""
    if mesh.degrees.pp == 1:
        kind = Replayed if can_replay(parts[0], mesh, config) else Whole
        return kind(parts[0], config.training.local_batch_size, num_sums)
    return Pipeline(parts, mesh, config, rows_per_rank, device, num_sums)
