"""How ranks share an evaluation (copies, sharded, tensor): opens a model on them, and decides which
rows share a batch.

copies      each rank has the whole model and evaluates its own documents; ranks communicate only
            at the end
sharded     parameters are sharded over the ranks (FSDP), which evaluate their own documents but
            run every forward pass together
tensor      neighboring ranks split each matrix and evaluate the same documents
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from overland.apps.evaluation.documents import Ids
from overland.config.derived import resolve_degrees
from overland.config.schema import JobConfig
from overland.errors import ModelError
from overland.files import ignore
from overland.models.decoder import Decoder
from overland.models.init import cast_floats, init_buffers
from overland.models.structure import tie
from overland.parallel.apply import parallelize, require_splittable
from overland.parallel.mesh import Mesh, build_mesh
from overland.parallel.plans import plan_for
from overland.parallel.sharding import local_part
from overland.words import any_of
from overland.world import World

if TYPE_CHECKING:
    from overland.apps.evaluation.model import Found


@dataclass(frozen=True)
class RankedModel:
    """A model in eval mode, or this rank's share of it, and which part of an evaluation this rank
    does, alone or together with others."""

    model: nn.Module
    device: torch.device
    multiple: int = 1
    """Row lengths must be a multiple of this, since tensor parallelism splits rows between
    blocks."""
    part: int = 0
    num_parts: int = 1
    """Number of parts that the documents are divided into."""
    leads: bool = True
    """Whether this rank reports for the ranks that evaluate the same documents."""
    in_step: bool = False
    """Whether all ranks run every forward pass together."""

    def goes_on(self, has_batch: bool) -> bool:
        """Whether there is a forward pass to run, for this rank or for another."""
        if not self.in_step:
            return has_batch
        some = torch.tensor([int(has_batch)])
        dist.all_reduce(some, dist.ReduceOp.MAX)
        return bool(some)

    @property
    def stretches_from(self) -> int | None:
        """The length beyond which rotary angles depend on the row's length, padding included."""
        model = self.model
        if not isinstance(model, Decoder) or model.config.rope.rope_type != "dynamic":
            return None
        return model.config.max_position_embeddings

    def num_together(self, lengths: Sequence[int], most: int) -> int:
        """Returns how many of these rows, the longest first, form a batch: at most `most`. Where
        padding would change what the model computes, only rows of the same length do."""
        if self.stretches_from is not None and lengths[0] > self.stretches_from:
            lengths = [one for one in lengths if one == lengths[0]]
        return min(most, len(lengths))

    def padded(self, rows: Sequence[Sequence[int] | Ids], filler: int = 0) -> Tensor:
        """Returns a batch on the device. Padding is at the end of rows, where causal attention
        cannot see it."""
        length = -(-max(map(len, rows)) // self.multiple) * self.multiple
        table_BS = np.full((len(rows), length), filler, np.int64)
        for row_S, values in zip(table_BS, rows, strict=True):
            row_S[: len(values)] = values
        return torch.from_numpy(table_BS).to(self.device)


def open_on_ranks(
    found: Found,
    world: World,
    device: torch.device,
    dtype: torch.dtype,
    shard: bool = False,
    tensor_parallel: int = 1,
) -> RankedModel:
    """Builds the model across all ranks, and fills each rank's part from the files."""
    is_split = world.size > 1 and (shard or tensor_parallel > 1)
    mesh = _mesh(world, device, shard, tensor_parallel) if is_split else None
    with torch.device("meta"):
        model = cast_floats(found.build(), dtype)
        if mesh is not None:
            require_splittable(model, found.architecture, mesh.degrees)
            _require_even(found.architecture, tensor_parallel)
            parallelize(model, plan_for(found.architecture), mesh, _config(dtype))
    model.to_empty(device=device)
    tie(model)
    init_buffers(model, device)
    found.fill(model, local_part, ignore)
    if mesh is None:
        return RankedModel(model.eval(), device, part=world.rank, num_parts=world.size)
    return RankedModel(
        model.eval(),
        device,
        tensor_parallel,
        mesh.dp_rank,
        mesh.dp_size,
        leads=mesh.rank("tp") == 0,
        in_step=mesh.degrees.dp_shard > 1,
    )


def _mesh(world: World, device: torch.device, shard: bool, tensor_parallel: int) -> Mesh:
    asked = {
        "parallelism.tensor_parallel_degree": tensor_parallel,
        "parallelism.sharding_stage": "zero3" if shard else "zero0",
    }
    settings = JobConfig().having(asked).parallelism
    return build_mesh(resolve_degrees(settings, world.size, world.local_size), device.type)


def _require_even(architecture: Any, tensor_parallel: int) -> None:
    plan = plan_for(architecture) if tensor_parallel > 1 else None
    if plan is not None and (uneven := plan.uneven(architecture, tensor_parallel)):
        raise ModelError(
            f"--tensor-parallel {tensor_parallel} does not divide {any_of(uneven, 'and')}: use "
            "another degree, or --shard"
        )


def _config(dtype: torch.dtype) -> JobConfig:
    """Returns the config for parallelizing a model without training it."""
    name = str(dtype).removeprefix("torch.")
    return JobConfig().having(
        {
            "compile.enable": False,
            "training.dtype": name,
            "training.mixed_precision_param": name,
            "activation_checkpoint.mode": "none",
        }
    )
