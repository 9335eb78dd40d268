"""Trains one tiny model under many layouts and compares losses and gradient norms of each step with
one process, within tolerances.

In float64, rounding cannot hide a mistake: the losses and gradient norms of a correct layout agree
to about 1e-15, those of a wrong one to 1e-5 at best. The loss on held-out data is compared too: its
rows are not all full, so that a mean of means over ranks or batches would differ.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from overland.apps.proofs.job import STEPS, held_out_data, proof_job
from overland.apps.proofs.layouts import ProofLayout, Sections
from overland.apps.proofs.pool import TIMEOUT_SECONDS, RankPool
from overland.apps.watch.files import finite
from overland.checks.machine import check_needs_compile, check_recompute, check_schedule
from overland.checks.parallelism import check_lengths, check_splits
from overland.config.errors import Problem
from overland.config.load import Loaded
from overland.config.schema import JobConfig
from overland.errors import ModelError
from overland.world import World
from overland.world.devices import device_type

# Largest relative differences in the loss and in the gradient norm that pass. Only float64 is a
# proof. In bfloat16, twenty steps on random tokens drift apart by up to 1.3e-2 in the loss
# (measured over the short list, where one process was 7e-3 from float32 and its layout 6e-3), and
# by then the norm, a sum of nearly cancelling terms, differs arbitrarily.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}
NORM_TOLERANCES = {"float64": 1e-9, "float32": 1e-2, "bfloat16": math.inf}
WIDER = {"float32": "float64", "bfloat16": "float32"}
FLOORS = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 1e-3}
SPREADS = 4
REFUSED = "refused"
CHUNK_TOKENS = 24  # of the loss: a row is a chunk and a shorter one

HEAD = """\
# Layouts that compute what one process computes

Written by `overland prove layout --table` (`make prove-all`). Each row is a tiny model, trained \
from the same seed on real processes over gloo, with the largest relative differences from one \
process over all steps: in the loss, in the gradient norm and in the loss on held-out data. Next \
to the number format are the bounds for the losses and for the norm. \
`overland/apps/proofs/layouts.py` explains the names.

| layout | ranks | number format | loss | gradient norm | validation loss | verdict |
|---|---|---|---|---|---|---|
"""


class Tolerance(NamedTuple):
    """The largest relative differences that pass."""

    loss: float
    norm: float


@dataclass(frozen=True)
class LayoutVerdict:
    layout: str
    ranks: int
    dtype: str
    loss_difference: float
    norm_difference: float
    validation_difference: float
    bounds: Tolerance
    error: str = ""

    @property
    def is_equal(self) -> bool:
        return (
            not self.error
            and all(map(math.isfinite, self.differences))
            and max(self.loss_difference, self.validation_difference) <= self.bounds.loss
            and self.norm_difference <= self.bounds.norm
        )

    @property
    def differences(self) -> tuple[float, float, float]:
        return self.loss_difference, self.norm_difference, self.validation_difference

    @property
    def is_refused(self) -> bool:
        """Whether this model, or this version of torch, cannot train in this layout."""
        kinds = ("overland.errors.ModelError", "overland.errors.Objective", REFUSED)
        return self.error.startswith(kinds)

    @property
    def verdict(self) -> str:
        if self.is_refused:
            return f"refused: {self.error.partition(': ')[2]}"
        if self.error:
            return f"failed: {self.error}"
        return "equal" if self.is_equal else "differs"

    def to_json(self) -> dict[str, Any]:
        found = {**asdict(self), "bounds": self.bounds._asdict(), "equal": self.is_equal}
        return {**finite(found), "verdict": self.verdict}

    def cells(self) -> list[str]:
        """A row of the table."""
        return [
            f"`{self.layout}`",
            str(self.ranks),
            f"{self.dtype} (≤ {self.bounds.loss:.2g}, {self.bounds.norm:.2g})",
            f"{self.loss_difference:.1e}",
            f"{self.norm_difference:.1e}",
            f"{self.validation_difference:.1e}",
            self.verdict,
        ]

    def line(self) -> str:
        """A line of the terminal."""
        return (
            f"{self.layout:<44}{self.ranks:>5}  {self.loss_difference:>8.1e}  "
            f"{self.norm_difference:>8.1e}  {self.validation_difference:>8.1e}  {self.verdict}"
        )


Curve = list[tuple[float, ...]]
Curves = tuple[Curve, Curve]
References = dict[tuple[str, ...], tuple[Curves, Tolerance, str]]


def prove_layouts(
    layouts: Iterable[ProofLayout],
    pool: RankPool,
    dtype: str = "float64",
    steps: int = STEPS,
    settings: Sections | None = None,
    references: References | None = None,
) -> Iterator[LayoutVerdict]:
    """Yields one verdict per layout. `settings` (from a user's config) apply to all. `references`
    caches what one process computed, by kind, for another call that differs only in its layouts."""
    references = {} if references is None else references
    for layout in layouts:
        with tempfile.TemporaryDirectory() as folder:
            validated = {"validation": held_out_data(Path(folder)), **(settings or {})}
            job_of = partial(
                proof_job,
                steps=steps,
                folder=Path(folder),
                settings=validated,
                device=pool.device_type,
            )
            if layout.kinds not in references:
                references[layout.kinds] = reference(pool, layout, dtype, job_of)
            alone, bounds, failure = references[layout.kinds]
            found: list[Curves] = []
            if not failure:
                found, failure = try_layout(pool, layout, job_of(layout, dtype))
        yield LayoutVerdict(
            layout.name,
            layout.num_ranks,
            dtype,
            largest_difference([got for got, _ in found], alone[0], 0),
            largest_difference([got for got, _ in found], alone[0], 1),
            largest_difference([got for _, got in found], alone[1], 0),
            bounds,
            failure,
        )


def try_layout(pool: RankPool, layout: ProofLayout, job: JobConfig) -> tuple[list[Curves], str]:
    """Returns what each rank computed, or the error that ended the run."""
    if message := refusal(job):
        return [], f"{REFUSED}: {message}"
    try:
        return pool.run(layout.num_ranks, curves, job, num_nodes=layout.num_nodes), ""
    except AssertionError as error:
        lines = [line for line in str(error).splitlines() if line.strip() and line != "no answer"]
        named = (line for line in reversed(lines) if not line.startswith("rank "))
        return [], next(named, f"no answer within {TIMEOUT_SECONDS[pool.device_type]} s")


def refusal(job: JobConfig) -> str:
    """Returns why a run of this config would not start, as far as it depends on the layout."""
    loaded, problems = Loaded(job, [], ""), list[Problem]()
    checks = check_schedule, check_needs_compile, check_recompute, check_splits, check_lengths
    with suppress(ModelError, OSError):  # the ranks report it
        for check in checks:
            problems += check(loaded)
    return next((str(one) for one in problems if one.kind != "note"), "")


def reference(
    pool: RankPool, layout: ProofLayout, dtype: str, job_of: Callable[[ProofLayout, str], JobConfig]
) -> tuple[Curves, Tolerance, str]:
    """Returns what one rank computes, how far from it a layout may be, and what failed."""
    bounds = Tolerance(TOLERANCES[dtype], NORM_TOLERANCES[dtype])
    jobs = [job_of(layout.alone(), dtype)]
    if pool.device_type == "cuda" and dtype in WIDER:
        jobs.append(job_of(layout.alone("accumulate"), dtype))
        jobs.append(job_of(layout.alone(), WIDER[dtype]))
    found: list[Curves] = []
    for job in jobs:
        curves_alone, failure = try_layout(pool, layout.alone(), job)
        if failure:
            return ([], []), bounds, f"on one rank: {failure}"
        found += curves_alone
    return found[0], spread_bounds(found[1:], found[0], dtype) if found[1:] else bounds, ""


def spread_bounds(others: list[Curves], alone: Curves, dtype: str) -> Tolerance:
    """Returns bounds for a GPU, whose kernels round by the shape of what they multiply: a few times
    what one rank differs from itself, when it computes row by row and when it computes in a wider
    format, which shows what rounding itself is worth (ranks round sums that one rank does not); at
    most what a CPU's ranks may differ."""
    losses = [difference(one[0], alone[0], 0) for one in others]
    losses += [difference(one[1], alone[1], 0) for one in others]
    norms = [difference(one[0], alone[0], 1) for one in others]
    loss, norm = (max(FLOORS[dtype], SPREADS * max(spread)) for spread in (losses, norms))
    return Tolerance(min(loss, TOLERANCES[dtype]), min(norm, NORM_TOLERANCES[dtype]))


def curves(world: World, config: JobConfig) -> Curves:
    """Returns the loss and gradient norm of every step, and the loss of every validation, on this
    rank."""
    import torch

    from overland.checks.model import import_custom
    from overland.training.build import build_run
    from overland.training.callbacks import Callback, Record
    from overland.training.loop import train
    from overland.training.run import Run

    steps: Curve = []
    validations: Curve = []

    class Recorder(Callback):
        def on_log(self, run: Run, record: Record) -> None:
            steps.append((record["loss"], record["grad_norm"]))

        def on_validation(self, run: Run, record: Record) -> None:
            validations.append((record["validation_loss"],))

    import_custom(config)
    kind = device_type(config.training.device)
    device = torch.device(kind if kind == "cpu" else f"{kind}:{torch.cuda.current_device()}")
    run = build_run(config, world, device, log_ranks=())
    run.callbacks = [Recorder(run)]
    with loss_in_chunks():
        train(run)
    return steps, validations


@contextmanager
def loss_in_chunks() -> Iterator[None]:
    """Lets the loss take several chunks of tokens, the last of them shorter."""
    from overland.models import loss
    from overland.parallel import tensor

    places = (loss, "CHUNK_TOKENS"), (loss, "KERNEL_CHUNK_TOKENS"), (tensor, "CHUNK_TOKENS")
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, CHUNK_TOKENS)
    try:
        yield
    finally:
        for (module, name), size in zip(places, before, strict=True):
            setattr(module, name, size)


def curve(world: World, config: JobConfig) -> Curve:
    return curves(world, config)[0]


def difference(got: Curve, expected: Curve, which: int) -> float:
    """Returns the largest relative difference over all steps; infinite if a step is missing or not
    a number."""
    if len(got) != len(expected) or not expected:
        return math.inf
    pairs = zip(got, expected, strict=True)
    return max(relative_difference(a[which], b[which]) for a, b in pairs)


def relative_difference(got: float, expected: float) -> float:
    gap = abs(got - expected)
    relative = gap / abs(expected) if expected else gap * math.inf if gap else 0.0
    return math.inf if math.isnan(relative) else relative


def largest_difference(found: list[Curve], expected: Curve, which: int) -> float:
    """Returns the same for the curves of several ranks; infinite without any."""
    return max((difference(got, expected, which) for got in found), default=math.inf)
