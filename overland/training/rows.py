"""Checks that the loss of a custom model or objective is a sum over rows.

A batch is split over ranks and passes, and their losses are added up. If rows interact, as in a
contrastive loss or in batch normalization, or if the loss is a mean, that is not the loss of the
batch. So before the first step, a few rows are passed together, and again in two halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from overland.data.batch import Batch
from overland.data.loader import load_batch
from overland.data.windows import Exhausted
from overland.errors import ModelError, ObjectiveError
from overland.models.registry import own_model_name
from overland.objectives.objective import NextToken, Objective
from overland.objectives.preference import PreferenceLoss
from overland.parallel.comm import first_problem
from overland.parallel.context import share_of_rows
from overland.parallel.sharding import reshard
from overland.training.step import total_sums, with_known, with_passes
from overland.world.heartbeat import Phase

if TYPE_CHECKING:
    from overland.training.run import Run

# Rounding alone: products of another number of rows may be summed in another order.
TOLERANCES = {"float64": 1e-9, "float32": 1e-3}
COARSE = 5e-2
MOST_SAMPLES = 4
SEE = "docs/extending.md#rows-that-are-compared"


def require_separate_rows(run: Run, report: Callable[[str], None]) -> None:
    """Raises if rows interact and the batch is split; reports it if the batch is in one piece.
    Called by all ranks together."""
    own_model = own_model_name(run.model_config) is not None or bool(run.config.model.transforms)
    own_objective = type(run.objective) not in (NextToken, Objective, PreferenceLoss)
    if not (own_model or own_objective) or run.progress.step >= run.config.training.steps:
        return
    run.beat.enter(Phase.DATA)
    try:
        batch = load_batch(run.dataset.rows, run.progress.batch, run.mesh.dp_rank, run.mesh.dp_size)
    except Exhausted:  # which the loop reports
        return
    share = share_of_rows(with_known(run, batch.to(run.device)), run.mesh)
    num_passes = math.ceil(len(share) / run.model.rows_per_pass)
    if run.mesh.degrees.pp > 1:
        num_passes = len(share) // run.config.parallelism.pipeline_parallel_microbatch_size
    is_split = run.mesh.dp_size * num_passes > 1
    if run.objective.gathers and num_passes == 1:
        return
    check = random_features if run.objective.gathers else interaction
    with quiet(run):
        problem = first_problem(check(run, share))
    if not problem:
        return
    names = [type(run.model.parts[0]).__name__] if own_model or not own_objective else []
    if own_objective:
        names.append(f"the objective {type(run.objective).__name__}")
    problem = f"{' with '.join(names)}: {problem}"
    split = f"{run.mesh.dp_size} data-parallel ranks with {num_passes} passes each"
    if run.objective.gathers:
        raise ObjectiveError(
            f"{problem}, but {num_passes} passes per step compute them twice: remove the dropout, "
            "or raise training.local_batch_size so that one pass takes all rows"
        )
    if is_split:
        raise (ObjectiveError if own_objective else ModelError)(
            f"{problem}, so {split} would train something else: return a sum over rows, compare "
            f"rows in an objective that gathers them ({SEE}), or train on one device with "
            f"training.local_batch_size = {run.global_batch_size}"
        )
    report(f"note: {problem}, so this run cannot be split over ranks or passes ({SEE})")


def interaction(run: Run, share: Batch) -> str:
    """Returns in what way rows interact; empty if they do not."""
    for part in run.model.parts:
        for name, module in part.named_modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                return f"{name} ({type(module).__name__}) normalizes over the rows of a pass"
    per_sample = run.objective.rows_per_sample
    if run.mesh.degrees.pp > 1:
        return in_pipeline(run, share, per_sample)
    half = min(MOST_SAMPLES, len(share) // per_sample) // 2 * per_sample
    if half:
        first, second = list(share.map(lambda x: x[: 2 * half]).split(half))
    else:  # a single sample
        first = second = share.map(lambda x: x[:per_sample])
    together = Batch({name: torch.cat([first[name], second[name]]) for name in first.fields})
    loss = total_loss(run, together)
    if differs(run, total_loss(run, together, seed=1), loss):
        for part in run.model.parts:
            part.eval()  # without dropout
        loss = total_loss(run, together)
        if differs(run, total_loss(run, together, seed=1), loss):
            return ""  # it draws random numbers, so nothing can be said
    apart = total_loss(run, first) + total_loss(run, second)
    return said(len(together), loss, apart) if differs(run, loss, apart) else ""


def in_pipeline(run: Run, share: Batch, per_sample: int) -> str:
    """Compares rows in a pipeline, whose micro-batches have a fixed number of rows: one half of
    each is replaced by the other half, either way round."""
    rows = run.config.parallelism.pipeline_parallel_microbatch_size
    half = rows // per_sample // 2 * per_sample
    if not half:
        return ""  # every row is alone
    places = torch.arange(len(share), device=share.device).view(-1, rows)
    sums = []
    for kept, replaced in ((0, half), (half, 0)):
        moved = places.clone()
        moved[:, replaced : replaced + half] = places[:, kept : kept + half]
        changed = {name: value[moved.flatten()] for name, value in share.fields.items()}
        sums.append(total_loss(run, Batch(changed)))
    loss, apart = total_loss(run, share), sum(sums) / 2
    return said(rows, loss, apart) if differs(run, loss, apart) else ""


def random_features(run: Run, share: Batch) -> str:
    """Returns whether features that are compared are random, and so differ between two passes."""
    rows = share if run.mesh.degrees.pp > 1 else share.map(lambda x: x[: run.model.rows_per_pass])
    if differs(run, total_loss(run, rows), total_loss(run, rows, seed=1)):
        return "features are random"
    return ""


def total_loss(run: Run, rows: Batch, seed: int = 0) -> float:
    """Returns the summed loss over all ranks."""
    torch.manual_seed(seed)
    kept = [(one, one.clone()) for part in run.model.parts for one in part.buffers()]
    sums = run.model.loss(with_passes(run, rows)).reshape(-1).double()
    for buffer, before in kept:
        buffer.copy_(before)
    return float(total_sums(sums, run.mesh)[0])


def differs(run: Run, one: float, other: float) -> bool:
    training = run.config.training
    bound = TOLERANCES.get(training.mixed_precision_param, COARSE)
    bound = COARSE if training.float8 != "off" else bound
    return abs(one - other) > bound * max(abs(one), abs(other))  # never true of NaN


def said(rows: int, loss: float, apart: float) -> str:
    return f"the loss of {rows} rows is {loss:.6g} in one pass, and {apart:.6g} in separate passes"


@contextmanager
def quiet(run: Run) -> Iterator[None]:
    """Leaves no trace: no gradients, no compiled code for these few rows, and the random state and
    the mode of each module as before."""
    eager = torch.compiler.set_stance("force_eager") if run.config.compile.enable else nullcontext()
    modes = [(one, one.training) for part in run.model.parts for one in part.modules()]
    devices = [run.device] if run.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), eager:
        yield
    for module, mode in modes:
        module.training = mode
    reshard(run.model.parts)
