"""Counts what a run has drawn from each source, using the ledger of consumed batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from overland.apps.ledger import batches_of
from overland.data.order import Mixture
from overland.data.plan import Plan
from overland.errors import OverlandError
from overland.files import read_json
from overland.run_folder import LEDGER, PLAN


@dataclass(frozen=True)
class Drawn:
    """Rows drawn from a source, and the share planned by its weight."""

    name: str
    rows: int
    share: float
    planned: float


@dataclass(frozen=True)
class DrawnMixture:
    sources: list[Drawn]
    note: str = ""
    """Why there are no counts."""


def drawn_mixture(run: Path) -> DrawnMixture:
    """Counts rows if weights count sequences. If they count documents, blocks contain
    documents of several sources, which only the corpora can tell apart: `overland prove data` does
    that."""
    try:
        plan = Plan.from_json(read_json(run / PLAN)["plan"])
        names = list(plan.sources)
        if plan.mixture == "documents" and len(names) > 1:
            return DrawnMixture([], "Documents of all sources share blocks (data.mixture = "
                                "documents): run `overland prove data` to count them.")  # fmt: skip
        rows = dict.fromkeys(names, 0)
        planned = dict.fromkeys(names, 0.0)
        for first, last in batches_fed(run / LEDGER):
            for name, count, wanted in _rows_of(plan, first, last):
                rows[name] += count
                planned[name] += wanted
    except (OverlandError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return DrawnMixture([], "Unknown: the data plan or the ledger is missing.")
    total = sum(rows.values())
    found = [
        Drawn(name, rows[name], rows[name] / total if total else 0.0, planned[name] / (total or 1))
        for name in names
    ]
    return DrawnMixture(found, "" if total else "Nothing has been drawn yet.")


def batches_fed(path: Path) -> list[tuple[int, int]]:
    """Returns ranges of batches that became part of the model, as [first, last)."""
    ranges: list[tuple[int, int]] = []  # from the last one back
    border = math.inf  # steps from here on were taken again, or undone
    for step, batch, count in reversed(list(batches_of(path))):
        if (kept := min(count, border - step)) > 0:
            last = batch + int(kept)
            last = ranges.pop()[1] if ranges and ranges[-1][0] == last else last
            ranges.append((batch, last))
        border = min(border, step + (count == 0))
    return ranges[::-1]


def _rows_of(plan: Plan, first: int, last: int) -> Iterator[tuple[str, int, float]]:
    """Yields how many rows of each source these batches contain, and how many its weight
    implies."""
    borders = [segment.first_batch for segment in plan.segments[1:]] + [last]
    names = list(plan.sources)
    for segment, border in zip(plan.segments, borders, strict=True):
        begin, end = max(first, segment.first_batch), min(last, border)
        if begin >= end:
            continue
        weights = [segment.weights.get(name, 0.0) for name in names]
        mixture, size = Mixture(weights), segment.global_batch_size
        until = mixture.before((end - segment.first_batch) * size)
        before = mixture.before((begin - segment.first_batch) * size)
        asked = np.array(weights) / sum(weights) * (end - begin) * size
        yield from zip(names, (until - before).tolist(), asked.tolist(), strict=True)
