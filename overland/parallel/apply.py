"""The order in which a model is made parallel. Each line changes the model in place.

Linear layers change what they compute before anything else looks at them. The context split
changes attention's core, which works on a tensor rank's own heads. Recompute wraps blocks, and
compile sees the recomputation. Sharding comes last: its hooks run outside of
compiled code.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from overland.config.degrees import Degrees
from overland.config.schema import JobConfig
from overland.models.buffers import cast, require_starts
from overland.models.config import DecoderConfig
from overland.models.decoder import Decoder
from overland.models.errors import ModelError
from overland.models.float8 import narrow_products
from overland.models.init import require_rules
from overland.models.registry import build_model
from overland.parallel.compile import compile_blocks
from overland.parallel.context import split_context
from overland.parallel.mesh import Mesh
from overland.parallel.pipeline import Pipeline, deal_layers, keep_stage, stages_of_rank
from overland.parallel.recompute import recompute
from overland.parallel.replay import Replayed
from overland.parallel.shard import shard
from overland.parallel.single import is_single
from overland.parallel.tensor import require_plain_head, split_tensors
from overland.parallel.whole import Whole

ParallelModel = Whole | Pipeline


def parallelize_decoder(model: Decoder, mesh: Mesh, config: JobConfig) -> None:
    """A decoder, or one pipeline stage of it, on the meta device."""
    layers = model.model.layers
    narrow_products(layers, config.training.float8)
    split_tensors(model, mesh.parameters["tp"], config.parallelism.enable_async_tensor_parallel)
    split_context(model, mesh.axis("cp"))
    # No block of ours draws random numbers; a user's may have dropout.
    recompute(layers, config.activation_checkpoint, random=not is_built_in(model))
    compile_blocks(model, config.compile)
    shard(model, list(layers.values()), mesh, config.training)


def build_parts(architecture: Any, mesh: Mesh, config: JobConfig) -> list[nn.Module]:
    """This rank's part of the model (with some schedules, two stages), on the meta device."""
    with torch.device("meta"):
        if mesh.degrees.pp > 1:
            parts: list[nn.Module] = [*build_stages(architecture, mesh, config)]
        else:
            parts = [build_undivided(architecture, config)]
            require_splittable(parts[0], mesh.degrees)
    for part in parts:
        if isinstance(part, Decoder):
            parallelize_decoder(part, mesh, config)
        else:  # a user's model: one piece, sharded as a whole
            shard(part, [], mesh, config.training)
    return parts


def build_undivided(architecture: Any, config: JobConfig) -> nn.Module:
    """The model as its `build` function makes it, in the parameters' type. Every part of every
    layout begins as this."""
    model = build_model(architecture, config.model.attention)
    require_rules(model)
    require_starts(model)
    require_no_hand_ties(model)
    cast(model, getattr(torch, config.training.dtype))
    freeze(model, config.model.freeze)
    return model


def require_splittable(model: nn.Module, degrees: Degrees) -> None:
    """Only of a Decoder is it known what can be cut where, as long as its parts are its own."""
    if not isinstance(model, Decoder):
        for axis in ("pp", "tp", "cp"):
            if getattr(degrees, axis) > 1:
                raise ModelError(
                    f"{type(model).__name__} is not a Decoder, so {axis} = "
                    f"{getattr(degrees, axis)} cannot split it; it can be sharded and replicated"
                )
        return
    if degrees.tp > 1:
        require_plain_head(model)
    if degrees.world_size > 1:
        require_blocks_apart(model)


def require_blocks_apart(model: Decoder) -> None:
    """A module that two blocks share would be cut twice, or be trained twice by two stages."""
    block_of: dict[nn.Module, str] = {}
    for number, block in model.model.layers.items():
        for name, module in block.named_modules():
            other = block_of.setdefault(module, number)
            if other != number and any(True for _ in module.parameters()):
                raise ModelError(
                    f"blocks {other} and {number} share one module, {name or 'the whole block'}; "
                    "a model with shared blocks trains on one device only"
                )


def require_no_hand_ties(model: nn.Module) -> None:
    """A parameter that two modules share would become two when it gets memory."""
    owner_of: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    tied = isinstance(model, Decoder) and model.config.tie_word_embeddings
    for prefix, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{own}" if prefix else own
            owner, first = owner_of.setdefault(parameter, (module, name))
            if owner is module or (tied and name == "lm_head.weight"):
                continue
            raise ModelError(
                f"{first} and {name} are one parameter, and would become two when the model gets "
                "its memory: a Decoder ties embedding and output by tie_word_embeddings = true in "
                "its config; elsewhere, let one module own the parameter and pass it to the other"
            )


def can_replay(model: nn.Module, mesh: Mesh, config: JobConfig) -> bool:
    """One NVIDIA GPU, and a model that never waits for it. Those with windows, and flex attention,
    make their masks in every pass and have not been tried; a user's model may do anything in a
    pass; blocks that are not compiled are there to be looked into."""
    if not (config.compile.enable and config.compile.cuda_graphs):
        return False
    if mesh.device_type != "cuda" or torch.version.hip or not is_single(mesh, config.training):
        return False
    plain = isinstance(model, Decoder) and model.config.sliding_window is None
    return plain and is_built_in(model) and config.model.attention != "flex"


def is_built_in(model: nn.Module) -> bool:
    """Whether nobody has changed what the blocks do: a user's `build` has a config class of its
    own."""
    return type(getattr(model, "config", None)) is DecoderConfig


def build_stages(architecture: Any, mesh: Mesh, config: JobConfig) -> list[Decoder]:
    schedule = config.parallelism.pipeline_parallel_schedule
    numbers = stages_of_rank(mesh.rank("pp"), mesh.degrees.pp, schedule)
    num_stages = mesh.degrees.pp * len(numbers)
    shares = deal_layers(architecture, num_stages)
    stages = []
    for number in numbers:
        stage = build_undivided(architecture, config)
        require_splittable(stage, mesh.degrees)
        assert isinstance(stage, Decoder)
        keep_stage(stage, shares[number], first=number == 0, last=number == num_stages - 1)
        stages.append(stage)
    return stages


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """By either name, where two modules share a parameter."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)


def build_parallel_model(
    parts: Sequence[nn.Module],
    mesh: Mesh,
    config: JobConfig,
    rows_per_rank: int,
    device: torch.device,
) -> ParallelModel:
    """The parts with memory and weights, ready to be given batches of `rows_per_rank` rows."""
    if mesh.degrees.pp == 1:
        kind = Replayed if can_replay(parts[0], mesh, config) else Whole
        return kind(parts[0], config.training.local_batch_size)
    stages = [part for part in parts if isinstance(part, Decoder)]
    tokens = config.training.seq_len // mesh.degrees.cp
    rows = config.parallelism.pipeline_parallel_microbatch_size
    return Pipeline(
        stages,
        mesh,
        config.parallelism.pipeline_parallel_schedule,
        microbatch_rows=rows,
        num_microbatches=rows_per_rank // rows,
        row_tokens=tokens,
        hidden_shape=(tokens // mesh.degrees.tp, stages[0].config.hidden_size),
        dtype=getattr(torch, config.training.mixed_precision_param),
        device=device,
    )
