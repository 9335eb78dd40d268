"""Names of what is logged of every step. What a model or an objective logs besides needs others, or
one number would hide the other."""

from __future__ import annotations

from collections.abc import Iterable

TAKEN = frozenset({
    "step", "time", "loss", "grad_norm", "lr", "tokens", "samples", "tokens_per_second",
    "samples_per_second", "tflops", "mfu", "memory_gib", "data_wait", "skipped_steps",
    "skipped_documents", "empty_steps",
})  # fmt: skip
VALIDATION = "validation_loss"  # and what begins with it


def first_taken(names: Iterable[str]) -> str | None:
    """The first of these names that means something else in the logs."""
    return next((name for name in names if name in TAKEN or name.startswith(VALIDATION)), None)
