"""Reads the evaluation results stored with a run, as scores per checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overland.apps.evaluation.results import read_results

MOST = 2000  # scores per run
PERPLEXITY = ("loss", "perplexity", "bits_per_byte", "byte_perplexity", "word_perplexity")


@dataclass(frozen=True)
class CheckpointScore:
    step: int
    name: str
    """The name of the task or the data."""
    metric: str
    value: float
    stderr: float | None = None


def read_scores(run: Path) -> list[CheckpointScore]:
    """Returns all scores, sorted by name, metric and step. If evaluations share a name but differ
    in their settings, a part of their key is appended to it."""
    records = read_results(run)
    times = Counter((one["step"], one.get("kind"), one.get("name")) for one in records)
    found: list[CheckpointScore] = []
    for record in records:
        is_one = times[record["step"], record.get("kind"), record.get("name")] == 1
        found += _scores(record, "" if is_one else f" ({str(record.get('key'))[:6]})")
    return sorted(found, key=lambda one: (one.name, one.metric, one.step))[:MOST]


def _scores(record: dict[str, Any], behind: str) -> Iterator[CheckpointScore]:
    step, scores = record["step"], record.get("scores")
    for one in scores if isinstance(scores, list) else ():
        if isinstance(one, dict) and (value := _number(one.get("value"))) is not None:
            shots = f", {one['shots']}-shot" if isinstance(one.get("shots"), int) else ""
            filtered = "" if one.get("filter") in (None, "none") else f", {one['filter']}"
            name, metric = f"{one.get('task')}{shots}{behind}", f"{one.get('metric')}{filtered}"
            yield CheckpointScore(step, name, metric, value, _number(one.get("stderr")))
    for metric in PERPLEXITY:
        if (value := _number(record.get(metric))) is not None:
            yield CheckpointScore(
                step, f"{record.get('name')}{behind}", metric.replace("_", " "), value
            )


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]
