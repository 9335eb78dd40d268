"""How ranks share an evaluation (copies, sharded, tensor): opens a model on them, and computes the
loss of rows of tokens.

copies      each rank has the whole model and evaluates its own documents; ranks communicate only
            at the end
sharded     parameters are sharded over the ranks (FSDP), which evaluate their own documents but
            run every forward pass together
tensor      neighboring ranks split each matrix and evaluate the same documents
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from overland.apps.evaluation.documents import Ids
from overland.apps.evaluation.score import stretches_from
from overland.config.derived import resolve_degrees
from overland.config.schema import JobConfig
from overland.data.lanes import IGNORED
from overland.errors import ModelError
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
    from overland.models.loss import OutputMatrix


@dataclass(frozen=True)
class Ranks:
    """This rank's share of the documents, and how it works with other ranks."""

    rank: int = 0
    size: int = 1
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


@dataclass(frozen=True)
class RowScorer:
    """Computes the summed loss of each row of a batch, in float64."""

    model: nn.Module
    device: torch.device
    vocab_size: int | None = None
    multiple: int = 1
    """Row lengths must be a multiple of this, since tensor parallelism splits rows between
    blocks."""

    @property
    def stretches_from(self) -> int | None:
        """The length beyond which rotary angles depend on the row's length, padding included."""
        return stretches_from(self.model)

    @torch.no_grad()
    def __call__(self, tokens_BS: Ids, labels_BS: Ids) -> list[float]:
        tokens = torch.from_numpy(tokens_BS).to(self.device)
        labels = torch.from_numpy(labels_BS).to(self.device)
        positions = torch.arange(tokens.shape[1], device=self.device)[None]
        if hasattr(self.model, "objective"):
            sums_B = self.model(tokens, positions, labels_BS=labels)
        else:  # a custom model, whose head only computes its own loss
            logits_NV = self.model(tokens, positions).flatten(0, 1)
            wide = torch.promote_types(logits_NV.dtype, torch.float32)
            losses_N = F.cross_entropy(
                logits_NV.to(wide), labels.flatten(), ignore_index=IGNORED, reduction="none"
            )
            sums_B = losses_N.view(labels.shape).double().sum(1)
        if not bool(sums_B.isfinite().all()):
            raise ModelError("the model's predictions are not finite: its weights are broken")
        found: list[float] = sums_B.tolist()
        return found


class RowLosses:
    """An objective for the head: the summed loss of each row."""

    def sums(self, head: OutputMatrix, hidden_BSD: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        return head.token_losses(hidden_BSD, fields["labels_BS"]).double().sum(1)


def scorer_for(model: nn.Module, device: torch.device, architecture: Any = None) -> RowScorer:
    """Returns a scorer for a model that is entirely on this device."""
    if hasattr(model, "objective"):
        model.objective = RowLosses()  # type: ignore[assignment]
    return RowScorer(model, device, getattr(architecture, "vocab_size", None))


def open_on_ranks(
    found: Found,
    world: World,
    device: torch.device,
    dtype: torch.dtype,
    shard: bool = False,
    tensor_parallel: int = 1,
) -> tuple[RowScorer, Ranks]:
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
    found.weights.fill(model, local_part)
    scorer = scorer_for(model.eval(), device, found.architecture)
    if mesh is None:
        return scorer, Ranks(world.rank, world.size)
    scorer = replace(scorer, multiple=tensor_parallel)
    leads = mesh.rank("tp") == 0
    return scorer, Ranks(mesh.dp_rank, mesh.dp_size, leads, in_step=mesh.degrees.dp_shard > 1)


def _mesh(world: World, device: torch.device, shard: bool, tensor_parallel: int) -> Mesh:
    settings = JobConfig().parallelism.model_copy(
        update={
            "tensor_parallel_degree": tensor_parallel,
            "sharding_stage": "zero3" if shard else "zero0",
        }
    )
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
    config = JobConfig.model_validate({"compile": {"enable": False}})
    training = config.training.model_copy(update={"dtype": name, "mixed_precision_param": name})
    recompute = config.activation_checkpoint.model_copy(update={"mode": "none"})
    return config.model_copy(update={"training": training, "activation_checkpoint": recompute})
