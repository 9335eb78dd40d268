"""Pipeline parallelism: how layers are split into stages over `pp` by cost, the schedule of their
micro-batches, and tied embeddings at both ends. Schedules are those of
`torch.distributed.pipelining`.

    schedule                stages per rank     order
    GPipe                          1            all forwards, then all backwards
    1F1B                           1            one forward, one backward
    Interleaved1F1B                2            the same, each rank twice in the loop
    InterleavedZeroBubble          2            weight gradients fill the gaps
    ZBVZeroBubble, DualPipeV       2            the loop turns back: rank 0 has first and last stage

Stages are whole decoders with parts removed, so parameter names are those of the unsplit model.
Layers are distributed by cost, including that of the output matrix. Tied embeddings live on the
first and the last stage: their gradients are summed before the update, which is then the same on
both, and the norm counts them once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overland.config.derived import STAGES_PER_RANK, TURNING
from overland.config.schema import JobConfig
from overland.data.batch import Batch
from overland.errors import ModelError
from overland.models.flops import StageCosts
from overland.models.structure import (
    Inputs,
    blocks_of,
    find_module,
    inside,
    remove_module,
    structure_of,
    ties_of,
)
from overland.parallel.mesh import Mesh
from overland.parallel.sharding import shard_of

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage


def stages_of_rank(rank: int, pp: int, schedule: str) -> list[int]:
    if STAGES_PER_RANK[schedule] == 1:
        return [rank]
    return [rank, 2 * pp - 1 - rank] if schedule in TURNING else [rank, rank + pp]


def deal_blocks(costs: StageCosts, num_stages: int) -> list[range]:
    """Returns the consecutive blocks of each stage, at least one: the division with the smallest
    sum of squared costs; of equal ones, the one that gives more to earlier stages."""
    total, sums = len(costs.blocks), [0.0, *itertools.accumulate(costs.blocks)]

    @cache
    def best(first: int, stages: int) -> tuple[float, int]:
        """Returns the least sum of squares of that many last stages, of which one begins with block
        `first`, and the negative number of the block that the one after it begins with."""
        if stages == 1:
            return (sums[-1] - sums[first] + costs.after) ** 2, -total
        return min(
            ((sums[end] - sums[first]) ** 2 + best(end, stages - 1)[0], -end)
            for end in range(first + 1, total - stages + 2)
        )

    dealt, first = [], 0
    for stages in range(num_stages, 0, -1):
        end = -best(first, stages)[1]
        dealt.append(range(first, end))
        first = end
    return dealt


def micro_batches_kept(schedule: str, pp: int, num_microbatches: int) -> list[set[tuple[int, ...]]]:
    """Returns, for each rank of a pipeline, how many micro-batches each of its stages keeps for the
    backward pass at a time: all combinations that occur in a step of torch's schedule.

    A micro-batch is kept from its forward pass until its backward pass is over. If that is split in
    two, the gradients of the inputs free nothing: torch computes them with `retain_graph`, and the
    nodes that it keeps for the gradients of the weights reach the whole graph. The gradients of the
    weights free all of it. In between, torch also holds the gradient of every output of an
    operation on a parameter, which is not counted here.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    numbers = stages_of_rank(0, pp, schedule)
    stages = [SimpleNamespace(stage_index=number, num_stages=pp * len(numbers), group_size=pp,
                              group_rank=0, is_first=number == 0, device=torch.device("cpu"),
                              is_last=number == pp * len(numbers) - 1, submod=nn.Identity())
              for number in numbers]  # fmt: skip
    kind: Callable[..., Any] = get_schedule_class(schedule)
    made = kind(
        stages if len(numbers) > 1 else stages[0], num_microbatches, loss_fn=lambda *_: None
    )
    change = {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_WEIGHT": -1}
    combinations = []
    for rank in range(pp):
        kept = dict.fromkeys(stages_of_rank(rank, pp, schedule), 0)
        found = set()
        for action in made.pipeline_order[rank]:
            for part in () if action is None else action.sub_actions or (action,):
                kept[part.stage_index] += change.get(part.computation_type.name, 0)
                found.add(tuple(kept.values()))
        combinations.append(found)
    return combinations


def keep_stage(model: nn.Module, blocks: range, *, first: bool, last: bool) -> None:
    """Removes from a model what belongs to other stages."""
    structure = structure_of(model)
    parts = (*structure.first_stage, *structure.blocks, *structure.last_stage)
    for name, _ in model.named_parameters():
        if not inside(name, parts):
            raise ModelError(
                f"{name} is outside {' and '.join(parts)}, so no pipeline stage would own it; put "
                "it into one of them, or set pp to 1"
            )
    for number, (name, block) in enumerate(blocks_of(model).items()):
        if not any(True for _ in block.parameters()):
            raise ModelError(
                f"{name} has no parameters, and blocks are assigned to stages by their parameters, "
                "so no pipeline stage would get it: put it into the block before, or set pp to 1"
            )
        if number not in blocks:
            remove_module(model, name)
    for path in (() if first else structure.first_stage) + (() if last else structure.last_stage):
        remove_module(model, path)
    if last:
        # One row per micro-batch: schedules concatenate them.
        model.register_forward_hook(lambda module, args, out: out.reshape(1, -1).clone())


class Pipeline:
    """The stages of this rank and their schedule. Called in the same way on every rank of the
    pipeline."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        mesh: Mesh,
        config: JobConfig,
        rows_per_rank: int,
        device: torch.device,
        num_sums: int = 1,
    ) -> None:
        layout, training, degrees = config.parallelism, config.training, mesh.degrees
        self.parts = list(parts)
        self.rows_per_pass = rows_per_rank
        self.num_sums = num_sums
        self._mesh, self._device = mesh, device
        self._name = layout.pipeline_parallel_schedule
        between = structure_of(parts[0]).between
        assert between is not None
        hidden_shape = between(training.seq_len // degrees.cp // degrees.tp)
        self._shape = (layout.pipeline_parallel_microbatch_size, *hidden_shape)
        self._dtype = getattr(torch, training.mixed_precision_param)
        self._numbers = stages_of_rank(mesh.rank("pp"), degrees.pp, self._name)
        self._num_stages = degrees.pp * len(self._numbers)
        self._inputs = Inputs(self.parts[0])
        self._scale = torch.ones((), device=device)
        self._sums: list[Tensor] = []
        self._schedule: Any = None
        self._tied = TiedEnds(self.parts, mesh)

    def loss_and_gradients(self, batch: Batch, scale: Tensor) -> Tensor:
        """Returns the summed loss times `scale`, and the objective's other sums (zero except on the
        last stage); leaves the gradients in the parameters."""
        sums = self._run("step", batch, scale)
        self._tied.sum_gradients()
        return sums

    def loss(self, batch: Batch) -> Tensor:
        return self._run("eval", batch, torch.ones((), device=batch.device))

    def forward_only(self, batch: Batch) -> None:
        """Runs forward passes without gradients, for an objective that records results."""
        self.loss(batch)

    def counted_once(self, parameter: nn.Parameter) -> bool:
        """Returns False for the last stage's copy of a tied embedding."""
        return not self._tied.is_copy(parameter)

    def _run(self, how: str, batch: Batch, scale: Tensor) -> Tensor:
        first, others = self._inputs.of(batch.fields)
        if self._schedule is None:
            self._schedule = self._open(first)
        self._scale, self._sums = scale, []
        args = (first,) if 0 in self._numbers else ()
        getattr(self._schedule, how)(*args, target=first, losses=[], **others)
        if not self._sums:
            return torch.zeros(self.num_sums, dtype=torch.float64, device=scale.device)
        return torch.stack(self._sums).sum(dim=0)

    def _open(self, first: Tensor) -> Any:
        """Returns the schedule, for batches whose first field is like this one."""
        from torch.distributed.pipelining.schedules import get_schedule_class

        rows = self._shape[0]
        wide = torch.promote_types(self._dtype, torch.float32)
        given = torch.empty(rows, *first.shape[1:], dtype=first.dtype, device="meta")
        hidden = torch.empty(self._shape, dtype=self._dtype, device="meta", requires_grad=True)
        sums = torch.empty(1, self.num_sums, dtype=wide, device="meta", requires_grad=True)
        stage = stage_class()
        stages = [
            stage(
                part,
                number,
                self._num_stages,
                self._device,
                input_args=given if number == 0 else hidden,
                output_args=sums if number == self._num_stages - 1 else hidden,
                group=self._mesh.axis("pp").get_group(),
            )
            for part, number in zip(self.parts, self._numbers, strict=True)
        ]
        kind: Callable[..., Any] = get_schedule_class(self._name)
        return kind(
            stages if STAGES_PER_RANK[self._name] > 1 else stages[0],
            self.rows_per_pass // rows,
            loss_fn=lambda output, target: self._note(output),
            scale_grads=False,
        )

    def _note(self, sums_1k: Tensor) -> Tensor:
        """Returns the loss of a micro-batch, and records all of its sums."""
        self._sums.append((sums_1k.detach()[0] * self._scale).double())
        # A separate tensor, because schedules that split the backward pass detach it in place.
        return sums_1k[0, 0] * self._scale


@cache
def stage_class() -> type[PipelineStage]:
    """Returns our subclass of stage. It is defined when needed, since torch's pipelining takes a
    second to import."""
    from torch.distributed.pipelining import PipelineStage

    class Stage(PipelineStage):
        """A stage that can run forward only, before it has trained and also if the next stage is on
        the same rank, as in schedules that turn back: there torch passes gradients on even if none
        were computed, and fails."""

        def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
            # Torch 2.11 and 2.12 mark these buffers only if the very first pass has a backward
            # pass; an objective's reference pass, for example, has none.
            for received in self.args_recv_info.values():
                for one in received:
                    buffer = getattr(one, "buffer", None)
                    if buffer is not None and buffer.is_floating_point():
                        buffer.requires_grad_(True)
            return super()._prepare_backward_infra(*args, **kwargs)

        def get_local_bwd_output(self, mb_index: int) -> Any:
            return super().get_local_bwd_output(mb_index) if self.has_backward else ()

        def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
            if self.has_backward:
                super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    return Stage


class TiedEnds:
    """Parameters at both ends of the pipeline: those before the first block, and their copies after
    the last one. Either or both may be on this rank."""

    def __init__(self, parts: Sequence[nn.Module], mesh: Mesh) -> None:
        ties = ties_of(parts[0])
        pairs = [
            (_parameter(parts, owner), _parameter(parts, copy)) for copy, owner in ties.items()
        ]
        # Frozen ones have no gradients to sum.
        self.pairs = [
            both for both in pairs if any(one is not None and one.requires_grad for one in both)
        ]
        self.group = end_group(mesh) if ties else None

    def is_copy(self, parameter: nn.Parameter) -> bool:
        return any(parameter is copy for _, copy in self.pairs)

    def sum_gradients(self) -> None:
        for both in self.pairs:
            here = [one for one in both if one is not None]
            gradients = [shard_of(one.grad) for one in here if one.grad is not None]
            assert len(gradients) == len(here)
            if len(gradients) == 2:  # both ends on this rank
                total = gradients[0] + gradients[1]
                for gradient in gradients:
                    gradient.copy_(total)
            elif gradients:
                dist.all_reduce(gradients[0], group=self.group)


def _parameter(parts: Sequence[nn.Module], name: str) -> nn.Parameter | None:
    """Returns a parameter by its name in the unsplit model, if it is on this rank."""
    path, _, own = name.rpartition(".")
    found = (find_module(part, path) for part in parts)
    return next((getattr(module, own) for module in found if module is not None), None)


def end_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """Returns the first and last rank of this rank's pipeline, as a group. Every rank takes part in
    creating the groups of all pipelines."""
    ranks = mesh.tokens.mesh  # [pp, dp, cp, tp]
    mine = None
    for ends in ranks[[0, -1]].flatten(1).t().tolist():
        group = dist.new_group(ends)
        if dist.get_rank() in ends:
            mine = group
            mesh.groups.append(group)
    return mine
