"""The order in which a model is made parallel. Each line changes the model in place.

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
from torch._functorch import config as functorch_config
from torch.distributed.tensor import DTensor

from overland.config.derived import Degrees, rows_per_step
from overland.config.schema import Compile, JobConfig
from overland.errors import ModelError
from overland.models.build import build_undivided
from overland.models.flops import stage_costs
from overland.models.inner import InnerLoss, Statistic
from overland.models.structure import (
    blocks_of,
    find_module,
    inside,
    structure_of,
)
from overland.parallel.activation_checkpointing import checkpoint_activations
from overland.parallel.cuda_graphs import Replayed
from overland.parallel.mesh import Mesh
from overland.parallel.micro_batches import Whole
from overland.parallel.pipeline import Pipeline, deal_blocks, keep_stage, stages_of_rank
from overland.parallel.plans import ParallelPlan, plan_for, without_plan
from overland.parallel.sharding import is_single, shard

ParallelModel = Whole | Pipeline
RECOMPILE_LIMIT = 64
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
    if structure is not None:
        compiled_and_split = bool(config.compile.enable) and mesh.degrees.tp > 1
        checkpoint_activations(
            blocks, config.activation_checkpoint, structure.random, compiled_and_split
        )
        compile_blocks(model, config.compile)
    shard(model, blocks, mesh, config)


def compile_blocks(model: nn.Module, settings: Compile) -> None:
    """Compiles block by block: one compilation serves all layers, which keeps start-up short."""
    assert settings.enable != "auto"  # resolved before
    if not settings.enable:
        return
    from torch._dynamo import config as dynamo_config  # a fifth of the import time at start

    # Lets compiled 8-bit products be cached for the next start like everything else: both of their
    # passes are part of the graph that is the cache key.
    functorch_config.autograd_cache_allow_custom_autograd_functions = True
    # A block passes dropout seeds to its adapters; it need not do so again when it is recomputed.
    dynamo_config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # A block is recompiled for each power of two of documents that a batch may hold, for the
    # lengths of training and validation, and with and without gradients; torch's default limit of 8
    # would end the run.
    dynamo_config.recompile_limit = RECOMPILE_LIMIT
    structure = structure_of(model)
    assert structure is not None
    others = (find_module(model, path) for path in structure.compiled)
    # Uncompiled, a decoder's last norm takes fourteen small kernels; under tensor parallelism such
    # modules are left alone.
    whole = [
        module
        for module in others
        if module is not None and not any(isinstance(p, DTensor) for p in module.parameters())
    ]
    for block in [*blocks_of(model).values(), *whole]:
        # Only the forward function, so that the hooks of sharding stay outside the graph.
        block.forward = torch.compile(
            block.forward, backend=settings.backend, fullgraph=True, dynamic=False
        )


def require_splittable(model: nn.Module, architecture: Any, degrees: Degrees) -> None:
    """Raises if a model cannot be split over the given degrees."""
    name, plan = type(model).__name__, plan_for(architecture)
    for axis, degree in without_plan(architecture, tp=degrees.tp, cp=degrees.cp).items():
        raise ModelError(
            f"{name} has no plan for {axis} = {degree} (register_plan, see docs/extending.md); it "
            "can be sharded and replicated"
        )
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
    if structure is None:
        return
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


def can_replay(model: nn.Module, mesh: Mesh, config: JobConfig) -> bool:
    """Whether steps can be replayed: on one NVIDIA GPU, with a model that never waits for it. Flex
    attention builds its masks in every pass and has not been tested; without compilation, blocks
    are meant to be debugged."""
    if not (config.compile.enable and config.compile.cuda_graphs):
        return False
    if mesh.device_type != "cuda" or torch.version.hip or not is_single(mesh, config):
        return False
    structure = structure_of(model)
    recordable = structure is not None and structure.recordable
    return recordable and config.model.attention != "flex"


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
    structure = structure_of(parts[0])
    assert structure is not None
    assert structure.between is not None
    tokens = config.training.seq_len // mesh.degrees.cp
    rows = config.parallelism.pipeline_parallel_microbatch_size
    return Pipeline(
        parts,
        mesh,
        config.parallelism.pipeline_parallel_schedule,
        microbatch_rows=rows,
        num_microbatches=rows_per_rank // rows,
        hidden_shape=structure.between(tokens // mesh.degrees.tp),
        dtype=getattr(torch, config.training.mixed_precision_param),
        device=device,
        num_sums=num_sums,
    )
