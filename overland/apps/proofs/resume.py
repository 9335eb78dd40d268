"""Saves under one layout, which trains on meanwhile, resumes under another, and compares losses and
gradient norms with a run that never stopped.

The same layout must give the same bits; a different one the losses of one process, in float64.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from overland.apps.proofs.job import proof_job
from overland.apps.proofs.layout import TOLERANCES, Curves, largest_difference, try_layout
from overland.apps.proofs.layouts import ProofLayout, Sections, parse_all
from overland.apps.proofs.pool import RankPool
from overland.apps.watch.files import finite
from overland.run_folder import CHECKPOINTS, checkpoint_name

SAVED_AT, STEPS = 3, 6
TOLERANCE = TOLERANCES["float64"]

# Every axis, sharding stage and kind of pipeline, tied embeddings included; up to 8 ranks.
DOZEN = parse_all("""
    shard1+tied  shard2:zero3+tied  shard4:zero2+tied  rep2xshard2+tied  tp2+tied  tp2xshard2+tied
    cp2+tied  pp2:1F1B+tied  pp2:Interleaved1F1B+tied  pp2:ZBVZeroBubble+tied  pp2xtp2+tied
    pp2xshard2xcp2+tied
""")

HEAD = """\
# Checkpoints that resume in any layout

Written by `overland prove resume --table` (`make prove-all`). In each row, a tiny model is \
trained for 6 steps under the first layout, and its checkpoint of step 3, written while it \
continues with step 4, is resumed for 3 steps under the second, in float64. The numbers are the \
largest relative differences from one process, in the loss and in the gradient norm. If both \
layouts are the same, every bit is compared with what the first run computed in steps 4 to 6. \
`overland/apps/proofs/layouts.py` explains the names.

| saved by | resumed by | loss | gradient norm | verdict |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Resumed:
    """The result of a resume. `same_bits` is None if the layouts differ, where it is not
    required."""

    before: str
    after: str
    loss_difference: float
    norm_difference: float
    same_bits: bool | None = None
    error: str = ""

    @property
    def is_equal(self) -> bool:
        differences = self.loss_difference, self.norm_difference
        return not self.error and self.same_bits is not False and max(differences) <= TOLERANCE

    @property
    def verdict(self) -> str:
        if not self.is_equal:
            return f"failed: {self.error}" if self.error else "differs"
        return "equal, bit for bit" if self.same_bits else "equal"

    def to_json(self) -> dict[str, Any]:
        return {**finite(asdict(self)), "equal": self.is_equal, "verdict": self.verdict}

    def cells(self) -> list[str]:
        """A row of the table."""
        differences = f"{self.loss_difference:.1e}", f"{self.norm_difference:.1e}"
        return [f"`{self.before}`", f"`{self.after}`", *differences, self.verdict]

    def line(self) -> str:
        """A line of the terminal."""
        return (
            f"{self.before:<28}{self.after:<28}{self.loss_difference:>8.1e}  "
            f"{self.norm_difference:>8.1e}  {self.verdict}"
        )


def prove_resumes(
    wanted: Sequence[tuple[ProofLayout, ProofLayout]], pool: RankPool
) -> Iterator[Resumed]:
    """Yields one verdict per pair. The checkpoint of one layout is used by all that resume it."""
    device = pool.device_type
    settings: Sections = {
        "debug": {"deterministic": device == "cuda"},
        "checkpoint": {"enable": True, "interval": SAVED_AT},
    }
    job_of = partial(proof_job, dtype="float64", steps=STEPS, settings=settings, device=device)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        saved, resumed = root / "saved", root / "resumed"
        alone: dict[tuple[str, ...], tuple[list[Curves], str]] = {}
        for before in {before.name: before for before, _ in wanted}.values():
            if before.kinds not in alone:
                job = job_of(before.alone(), folder=root / "alone")
                alone[before.kinds] = try_layout(pool, before.alone(), job)
            references, failure = alone[before.kinds]
            unbroken: list[Curves] = []
            if not failure:
                unbroken, failure = try_layout(pool, before, job_of(before, folder=saved))
                shutil.rmtree(saved / CHECKPOINTS / checkpoint_name(STEPS), ignore_errors=True)
            for after in [after for first, after in wanted if first == before]:
                if failure:
                    yield Resumed(before.name, after.name, math.inf, math.inf, error=failure)
                    continue
                shutil.copytree(saved, resumed, symlinks=True)
                tried, error = try_layout(pool, after, job_of(after, folder=resumed))
                found, rest = [steps for steps, _ in tried], references[0][0][SAVED_AT:]
                expected = [steps[SAVED_AT:] for steps, _ in unbroken]
                yield Resumed(
                    before.name,
                    after.name,
                    largest_difference(found, rest, 0),
                    largest_difference(found, rest, 1),
                    found == expected if before == after else None,
                    error,
                )
                shutil.rmtree(resumed)
            shutil.rmtree(saved, ignore_errors=True)
