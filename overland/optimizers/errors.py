"""The error that a user of the optimizers room sees: one sentence, with the way out."""

from __future__ import annotations


class OptimizerError(ValueError):
    """An optimizer that does not exist, or cannot be used as asked."""
