"""The error that a user of the objectives room sees: one sentence, with the way out."""

from __future__ import annotations


class ObjectiveError(ValueError):
    """An objective that does not exist, or cannot be used as asked."""
