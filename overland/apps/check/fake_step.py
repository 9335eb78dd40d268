"""Simulates one training step of one rank of any world, without devices, to count its memory and
collectives: the real mesh and model, over a fake process group and with fake tensors. The model is
sharded on the meta device, then stepped; fake tensors have shapes but no memory.

What fails here would also fail on the cluster, after hours in the queue. The counts (parameters,
bytes, collectives) are exact for the step as written, but exclude the workspace of kernels. The
step is not compiled, so a compiled run keeps less for its backward pass than is counted here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from operator import mul
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from overland.apps.proofs.pool import forget_meshes
from overland.checks.own_model import made_up_fields
from overland.config.derived import (
    STAGES_PER_RANK,
    Degrees,
    optimizer_settings,
    resolve_degrees,
    resolve_dtype,
    rows_per_step,
)
from overland.config.schema import JobConfig
from overland.data.batch import Batch
from overland.models.flops import stage_costs
from overland.models.registry import model_config
from overland.models.structure import Inputs, find_module, structure_of, tie
from overland.objectives import give_objective, objective_for
from overland.objectives.objective import Objective, count_of
from overland.optimizers.elementwise import AdamW
from overland.optimizers.optimizer import Optimizer
from overland.parallel.apply import build_parts
from overland.parallel.mesh import build_mesh
from overland.parallel.pipeline import deal_blocks, micro_batches_kept, stages_of_rank
from overland.parallel.sharding import shard_of, splits
from overland.parallel.whole import checked_sums

# Raised if a user's code reads values, which fake tensors do not have.
NOT_FOR_FAKES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)

RANKS_PER_NODE = 8  # of a run elsewhere; hybrid stages shard within a node
KEPT = "kept_for_backward"  # by all micro-batches in flight


@dataclass(frozen=True)
class FakeStep:
    rank: int
    parameters: int
    num_bytes: dict[str, int]  # of parameters, gradients, optimizer, and KEPT
    microbatch_bytes: tuple[int, ...]  # of that, what each stage keeps per micro-batch
    collectives: dict[str, int]
    seconds: float

    @property
    def total_bytes(self) -> int:
        return sum(self.num_bytes.values())


def fake_steps(config: JobConfig, world_size: int, device_type: str = "cuda") -> list[FakeStep]:
    """Returns a step of rank 0; with a pipeline, of the first rank of each stage. `device_type`:
    where the run will be, which decides its precision."""
    config = resolve_dtype(config, device_type)
    degrees = resolve_degrees(config.parallelism, world_size, RANKS_PER_NODE)
    if degrees.pp == 1:
        return [fake_step(config, degrees, 0)]
    schedule = config.parallelism.pipeline_parallel_schedule
    costs = stage_costs(model_config(config.model))
    shares = deal_blocks(costs, degrees.pp * STAGES_PER_RANK[schedule])
    rows = rows_per_step(config.training, degrees.dp) // degrees.dp
    num_microbatches = max(1, rows // config.parallelism.pipeline_parallel_microbatch_size)
    kept = micro_batches_kept(schedule, degrees.pp, num_microbatches)
    steps, alike = [], dict[tuple[Any, ...], FakeStep]()
    for place, combinations in enumerate(kept):
        numbers = stages_of_rank(place, degrees.pp, schedule)
        # Middle stages with the same number of layers have the same counts.
        kind = tuple((len(shares[n]), n == 0, n == len(shares) - 1) for n in numbers)
        rank = place * (world_size // degrees.pp)
        step = alike[kind] if kind in alike else fake_step(config, degrees, rank)
        alike[kind] = replace(step, seconds=0.0)
        num_bytes = {**step.num_bytes, KEPT: most_kept(step, combinations)}
        steps.append(replace(step, rank=rank, num_bytes=num_bytes))
    return steps


def most_kept(step: FakeStep, combinations: Iterable[tuple[int, ...]]) -> int:
    """Returns the bytes at the moment when a rank's stages keep the most. What one pass of each
    stage keeps beyond `microbatch_bytes` is parameters, which all micro-batches share."""
    shared = step.num_bytes[KEPT] - sum(step.microbatch_bytes)
    each = step.microbatch_bytes
    return shared + max(sum(map(mul, counts, each)) for counts in combinations)


def fake_step(config: JobConfig, degrees: Degrees, rank: int) -> FakeStep:
    started = time.perf_counter()
    config = config.having({"compile.enable": False})  # fakes cannot be compiled
    if config.activation_checkpoint.mode == "auto":  # its choice depends on the device
        config = config.having({"activation_checkpoint.mode": "none"})
    with fake_world(rank, degrees.world_size):
        mesh = build_mesh(degrees, "cpu")
        architecture = model_config(config.model)
        parts = build_parts(architecture, mesh, config)
        objective = objective_for(config, architecture)
        objective.bind(mesh)
        give_objective(parts, objective)
        with FakeTensorMode(allow_non_fake_inputs=True), Collectives() as collectives:
            saved = SavedBytes()
            for part in parts:
                part.to_empty(device="cpu")
                tie(part)
            optimizer = Optimizer(parts, optimizer_settings(config))
            if splits(mesh, config):
                optimizer.split()
            each = []
            count_of(objective, Batch(fields_of_pass(architecture, config, degrees)))
            for part in parts:
                first, others = stage_inputs(part, architecture, config, degrees)
                for field in objective.passes:
                    others |= found_in_pass(part, first, others, objective, field)
                with saved:
                    output = part(first, **others)
                if degrees.pp == 1:
                    num_sums = 1 + len(objective.metrics)
                    output = checked_sums(output, num_sums, type(part).__name__)
                else:  # a second micro-batch, to count only its memory
                    before, counts = saved.total, collectives.counts.copy()
                    again = first.detach().clone().requires_grad_(first.requires_grad)
                    with saved:
                        second = part(again, **others)
                    each.append(saved.total - before)
                    saved.total, collectives.counts = before, counts
                    del second
                if output.requires_grad:  # a first stage may be frozen
                    output.sum().backward()
            if not all(isinstance(rule, AdamW) for rule in optimizer.rules):
                with fake_tensor.unset_fake_temporarily():  # it reads which rank has which matrix
                    optimizer.prepared()
                one, none = torch.ones(()), torch.zeros(())
                with suppress(*NOT_FOR_FAKES):  # a user's rule must return the right shapes
                    optimizer.update(0.1, one, 0.0, one, skip=none)
            with optimizer.whole():
                parameters = [shard_of(p.detach()) for part in parts for p in part.parameters()]
                trained = [shard_of(p.detach()) for p in optimizer.parameters]
    return FakeStep(
        rank,
        sum(p.numel() for p in parameters),
        {
            "parameters": sum(p.nbytes for p in parameters),
            "gradients": sum(p.nbytes for p in trained),
            "optimizer": optimizer.num_bytes,
            KEPT: saved.total,
        },
        tuple(each),
        dict(sorted(collectives.counts.items())),
        time.perf_counter() - started,
    )


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def stage_inputs(
    part: nn.Module, architecture: Any, config: JobConfig, degrees: Degrees
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the first input of a part, and its other inputs from one micro-batch."""
    fields = fields_of_pass(architecture, config, degrees)
    first, others = Inputs(part).of(fields)
    structure = structure_of(part)
    has_start = all(find_module(part, path) is not None for path in structure.first_stage)
    if structure.between is not None and not has_start:
        dtype = getattr(torch, config.training.mixed_precision_param)
        tokens = config.training.seq_len // degrees.cp
        shape = (len(first), *structure.between(tokens // degrees.tp))
        first = torch.zeros(shape, dtype=dtype, requires_grad=True)
    return first, others


def fields_of_pass(architecture: Any, config: JobConfig, degrees: Degrees) -> dict[str, Tensor]:
    """Returns a rank's part of the inputs of one pass, filled with zeros."""
    rows = config.training.local_batch_size
    if degrees.pp > 1:
        rows = config.parallelism.pipeline_parallel_microbatch_size
    return made_up_fields(architecture, rows, config.training.seq_len // degrees.cp, config)


def found_in_pass(
    part: nn.Module, first: Tensor, others: dict[str, Tensor], objective: Objective, field: str
) -> dict[str, Tensor]:
    """Returns the fields that a pass without gradients adds to the batch."""
    with torch.no_grad(), objective.during(field, [part]), objective.finding(field) as found:
        part(first, **others)
    return {field: objective.completed(field, torch.cat(found), others)} if found else {}


class Collectives(TorchDispatchMode):
    """Counts collectives by kind."""

    NAMES = {
        "allgather": "all-gather",
        "reducescatter": "reduce-scatter",
        "allreduce": "all-reduce",
    }

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            plain = func._schema.name.split("::")[1].replace("_", "")
            for start, name in self.NAMES.items():
                self.counts[name] += plain.startswith(start)
        return func(*args, **(kwargs or {}))


class SavedBytes(saved_tensors_hooks):
    """Counts the bytes that the forward pass keeps for the backward pass, each storage once.
    Gathered parameters count too, since they are in memory at that moment."""

    def __init__(self) -> None:
        super().__init__(self.pack, lambda tensor: tensor)
        self.total = 0
        # Kept alive, since a new storage could get the address of a freed one.
        self._seen: dict[int, UntypedStorage] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        plain = shard_of(tensor)
        storage = plain.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            self.total += plain.nbytes
        return tensor
