"""The error that a user of the models room sees: one sentence, with the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ModelError(ValueError):
    """A model, config.json, attention backend or weight file that cannot be used as asked."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """`; did you mean 'x'?` for a misspelt name, or the list of valid names where none is near."""
    names = sorted(valid)
    lower = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{lower[close[0]]}'?"
    return f"; valid names: {', '.join(names)}" if names else ""
