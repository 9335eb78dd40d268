"""Checks that the loss of a custom model or objective is a sum over rows.

A batch is split over ranks and passes, and their losses are added up. If rows interact, as in a
contrastive loss or in batch normalization, or if the loss is a mean, that is not the loss of the
batch. So before the first step, the gradients of two samples, A and B, are compared:

    A B and B A, with A A and B B     Whatever a row is given by the rows around it. Passes of the
                                      same size and seed round and draw alike, so even dropout and
                                      routers in bfloat16 make no difference.
    A B, with A and B                 A mean, or a term that is added once per pass.

Losses alone say too little: most runs start near log(vocabulary size), whatever rows do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from overland.data.batch import Batch, load_batch
from overland.data.windows import Exhausted
from overland.errors import ModelError, ObjectiveError
from overland.models.registry import own_model_name
from overland.objectives.objective import NextToken, Objective
from overland.objectives.preference import PreferenceLoss
from overland.parallel.apply import batch_norm
from overland.parallel.comm import first_problem, total_sums
from overland.parallel.context import share_of_rows
from overland.parallel.sharding import reshard
from overland.parallel.whole import Whole
from overland.training.run import Run
from overland.training.step import gradient_norm, with_known, with_passes
from overland.world.heartbeat import Phase

# Rounding: 2e-15, 5e-7 and 4e-3 were measured for passes of the same size. If sizes differ, a
# router in bfloat16 may choose other experts; a mean over rows is off by half.
EXCHANGED = {"float64": 1e-9, "float32": 1e-4}
HALVED = {"float64": 1e-9, "float32": 1e-3}
COARSE, ROUGH = 2e-2, 0.25
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
    with quiet(run):
        problem = first_problem(interaction(run, share, num_passes))
    if not problem:
        return
    names = []
    if own_model or not own_objective:
        names.append(type(run.model.parts[0]).__name__.removeprefix("FSDP"))
    if own_objective:
        names.append(f"the objective {type(run.objective).__name__}")
    problem = f"{' with '.join(names)}: {problem}"
    if is_split:
        raise (ObjectiveError if own_objective else ModelError)(
            f"{problem}, so {run.mesh.dp_size} data-parallel ranks with {num_passes} passes each "
            "would train something else: return a sum over rows, compare rows in an objective that "
            f"gathers them ({SEE}), or train on one device with training.local_batch_size = "
            f"{run.global_batch_size}"
        )
    report(f"note: {problem}, so this run cannot be split over ranks or passes ({SEE})")


def interaction(run: Run, share: Batch, num_passes: int) -> str:
    """Returns in what way rows interact; empty if they do not."""
    for part in run.model.parts:
        if name := batch_norm(part):
            return f"{name} normalizes over the rows of a pass"
    per_sample, is_piped = run.objective.rows_per_sample, run.mesh.degrees.pp > 1
    if is_piped:  # its micro-batches have a fixed number of rows
        rows = run.config.parallelism.pipeline_parallel_microbatch_size
    else:
        rows = min(len(share), run.model.rows_per_pass, 2 * per_sample)
    half = rows // per_sample // 2 * per_sample
    if not half:  # no two samples are ever in one pass
        return "" if is_piped else alone(run, share.map(lambda x: x[:per_sample]))
    if not is_piped:
        rows = 2 * half
        share = share.map(lambda x: x[:rows])
    limit = tolerance(run, EXCHANGED, COARSE)
    is_random = compare(run, [share], [share], seed=1).by > limit / 2
    if is_random and run.objective.gathers and num_passes > 1:
        raise ObjectiveError(
            f"{type(run.objective).__name__}: features are random, but {num_passes} passes per "
            "step compute them twice: remove the dropout, or raise training.local_batch_size so "
            "that one pass takes all rows"
        )
    if not is_random or compare(run, [share], [share]).by <= limit / 2:  # the seed repeats it
        swapped, first, second = exchanged(share, rows, half)
        found = compare(run, [share, swapped], [first, second])
        if found.by > limit:
            return (
                f"other rows of a pass change the gradient of a row, by {found.by:.2g} of its norm"
            )
    if is_piped:
        return ""
    if is_random:
        for part in run.model.parts:
            part.eval()  # without dropout
        is_random = compare(run, [share], [share], seed=1).by > limit / 2
    found = compare(run, [share], list(share.split(half)))
    differs = found.sums_differ(ROUGH) if is_random else found.by > tolerance(run, HALVED, ROUGH)
    return said(run, rows, found) if differs else ""


def alone(run: Run, sample: Batch) -> str:
    """Compares a sample with itself. There may be no memory for the gradients of two."""
    twice = Batch({name: torch.cat([one, one]) for name, one in sample.fields.items()})
    found = Difference(math.nan, total_loss(run, twice), 2 * total_loss(run, sample))
    is_random = Difference(math.nan, found.together, total_loss(run, twice, seed=1)).sums_differ(0)
    differs = found.sums_differ(ROUGH if is_random else tolerance(run, HALVED, ROUGH))
    return said(run, len(twice), found) if differs else ""


class Difference(NamedTuple):
    by: float
    """Norm of the difference of the gradients, as a share of their norm."""
    together: float
    apart: float

    def sums_differ(self, bound: float) -> bool:
        largest = max(abs(self.together), abs(self.apart))
        return abs(self.together - self.apart) > bound * largest  # never true of NaN


def compare(
    run: Run, together: Sequence[Batch], apart: Sequence[Batch], seed: int = 0
) -> Difference:
    """Compares the summed gradients of some passes with those of others, which may have another
    seed of random numbers."""
    parameters, kept = run.optimizer.parameters, dict[nn.Parameter, Tensor]()
    sums, norm = {1: 0.0, -1: 0.0}, math.nan
    for number, rows in enumerate((*together, *apart)):
        sign = 1 if number < len(together) else -1
        torch.manual_seed(0 if sign == 1 else seed)
        scale = sign * run.scaler.scale.double() / len(together[0])
        with unchanged_buffers(run), torch.enable_grad():
            run.inner.begin_step(scale)
            given = rows if run.objective.gathers else with_passes(run, rows)
            scale = scale / run.measure.per_row
            step = run.model.loss_and_gradients
            if isinstance(run.model, Whole):  # without recording
                step = partial(Whole.loss_and_gradients, run.model)
            sums[sign] += float(total_sums(step(given, scale), run.mesh)[0] / scale)
        if number == 0:
            norm = gradient_norm(run.optimizer, run.model, run.mesh).item()
        if run.mesh.degrees.pp > 1:  # both ends sum the gradients of tied weights in every step
            for parameter in parameters:
                if parameter.grad is not None:
                    before = kept.get(parameter)
                    kept[parameter] = parameter.grad if before is None else before + parameter.grad
                    parameter.grad = None
    for parameter, gradient in kept.items():
        parameter.grad = gradient
    by = gradient_norm(run.optimizer, run.model, run.mesh).item() / norm if norm else math.nan
    for parameter in parameters:
        parameter.grad = None
    return Difference(by, sums[1], sums[-1])


def exchanged(share: Batch, rows: int, half: int) -> tuple[Batch, ...]:
    """Returns the batch with the halves of each pass exchanged, with the first half twice, and with
    the second half twice."""
    places = torch.arange(len(share), device=share.device).view(-1, rows)
    first, second = places[:, :half], places[:, half : 2 * half]
    rest = places[:, 2 * half :]
    orders = [
        torch.cat([one, other, rest], dim=1).flatten()
        for one, other in ((second, first), (first, first), (second, second))
    ]
    return tuple(share.map(itemgetter(order)) for order in orders)


def total_loss(run: Run, rows: Batch, seed: int = 0) -> float:
    """Returns the summed loss over all ranks."""
    torch.manual_seed(seed)
    with unchanged_buffers(run):
        given = rows if run.objective.gathers else with_passes(run, rows)
        sums = run.model.loss(given).reshape(-1).double()
    return float(total_sums(sums, run.mesh)[0])


@contextmanager
def unchanged_buffers(run: Run) -> Iterator[None]:
    kept = [(one, one.clone()) for part in run.model.parts for one in part.buffers()]
    yield
    with torch.no_grad():
        for buffer, before in kept:
            buffer.copy_(before)


def tolerance(run: Run, by_dtype: Mapping[str, float], otherwise: float) -> float:
    training = run.config.training
    if training.float8 != "off":  # rows share a scale
        return ROUGH
    return by_dtype.get(training.mixed_precision_param, otherwise)


def said(run: Run, rows: int, found: Difference) -> str:
    ranks = run.mesh.dp_size
    share = f"{100 * found.by:.2g}%" if found.by < 1 else "100% or more"
    by = "" if math.isnan(found.by) else f" (the gradients differ by {share})"
    return (
        f"the loss of {rows} rows is {found.together / ranks:.6g} in one pass, and "
        f"{found.apart / ranks:.6g} in two{by}"
    )


@contextmanager
def quiet(run: Run) -> Iterator[None]:
    """Leaves no trace: no compiled code for these few rows, and the random state and the mode of
    each module as before. Features that an objective compares are looked at one by one."""
    eager = torch.compiler.set_stance("force_eager") if run.config.compile.enable else nullcontext()
    modes = [(one, one.training) for part in run.model.parts for one in part.modules()]
    devices = [run.device] if run.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), eager, run.objective.row_by_row():
        yield
    for module, mode in modes:
        module.training = mode
    reshard(run.model.parts)
