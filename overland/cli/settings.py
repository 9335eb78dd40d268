"""The words after a verb: an optional CONFIG, then settings."""

from __future__ import annotations

from typing import Annotated

import typer

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="CONFIG [section.key=value ...]", show_default=False),
]


def split_settings(words: list[str] | None) -> tuple[str | None, list[str]]:
    """(CONFIG if the first word is one, the rest)."""
    if words and not words[0].startswith("--") and "=" not in words[0]:
        return words[0], words[1:]
    return None, list(words or [])
