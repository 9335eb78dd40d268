"""Problems of a config, one line each.

A line gives the place (file and line, command line, or environment variable), the key and value,
what was expected, and the nearest valid name: `run.toml:12: training.seq_lenn = 2048: unknown key;
did you mean training.seq_len?`
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from overland.errors import Kind, OverlandError

NO_VALUE: Any = type("NoValue", (), {"__repr__": lambda self: "NO_VALUE"})()

ProblemKind = Literal["invalid", "missing", "machine", "note"]


@dataclass(frozen=True)
class Problem:
    """One thing to fix. `kind` says what kind of fix it needs:

    invalid: fix the config; missing: a file or dataset is still to be fetched; machine: this
    machine or torch build lacks something; note: worth knowing, but no reason to stop.
    """

    message: str
    where: str = ""
    key: str = ""
    value: Any = NO_VALUE
    nearest: str | None = None
    kind: ProblemKind = "invalid"
    can_be_fetched: bool = False
    """Of something missing: whether a command that the message names brings it."""

    def __str__(self) -> str:
        subject = self.key
        if self.value is not NO_VALUE:
            subject = f"{subject} = {show_value(self.value)}" if subject else show_value(self.value)
        text = ": ".join(part for part in (self.where, subject, self.message) if part)
        text = f"{text}; did you mean {self.nearest}?" if self.nearest else text
        return " ".join(text.splitlines())  # one problem is one line, even if the value has several


class ConfigError(OverlandError):
    """All problems of a config at once. `partial` is what could be read despite them."""

    kind = Kind.CONFIG

    def __init__(self, problems: Iterable[Problem], partial: Any = None) -> None:
        self.problems = list(problems)
        self.partial = partial
        super().__init__("\n".join(str(problem) for problem in self.problems))


def show_value(value: Any, limit: int = 60) -> str:
    """Returns the value as TOML would write it, truncated to `limit` characters."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif value is None:
        text = "null"
    elif isinstance(value, str):
        text = '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    elif isinstance(value, list):
        text = "[" + ", ".join(show_value(item, limit) for item in value) + "]"
    elif isinstance(value, dict):
        items = (f"{key} = {show_value(item, limit)}" for key, item in value.items())
        text = "{" + ", ".join(items) + "}"
    else:
        text = str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
