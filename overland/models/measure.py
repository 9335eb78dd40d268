"""What a row of the batch is to a model, and what training is counted in: tokens, or samples that
are named arrays. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from overland.models.flops import flops_per_token

SampleFields = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Measure:
    unit: Literal["tokens", "samples"]
    per_row: int
    flops: float | None
    """Training FLOP per unit; None where the model does not say."""


def sample_fields(config: Any) -> SampleFields | None:
    """Type and shape of each array that the model takes, by name; None: it takes tokens."""
    describe = getattr(config, "sample_fields", None)
    return None if describe is None else describe()


def measure_of(config: Any, seq_len: int) -> Measure:
    if sample_fields(config) is None:
        return Measure("tokens", seq_len, flops_per_token(config, seq_len))
    count = getattr(config, "flops_per_sample", None)
    return Measure("samples", 1, None if count is None else float(count()))
