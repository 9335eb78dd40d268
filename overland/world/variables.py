"""Numbers in environment variables."""

from __future__ import annotations

from collections.abc import Mapping

from overland.errors import ClusterError


def number(env: Mapping[str, str], name: str, default: int | None = None, at_least: int = 0) -> int:
    text = env.get(name, "" if default is None else str(default)).strip()
    if not text.isdecimal() or int(text) < at_least:
        raise ClusterError(
            f'environment {name}: "{text}": expected a whole number, {at_least} or more'
        )
    return int(text)


def first_set(env: Mapping[str, str], *names: str) -> str | None:
    """The first of these variables that is there."""
    return next((name for name in names if env.get(name, "").strip()), None)
