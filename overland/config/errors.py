"""The kinds of problems of a config, and how each is written in one line. `validate.py` finds them,
and the name that was meant.

A line gives the place (file and line, command line, or environment variable), the key and value,
what was expected, and the nearest valid name: `run.toml:12: training.seq_lenn = 2048: unknown key;
did you mean training.seq_len?`
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

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
    text = toml_value(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def toml_value(value: Any) -> str:
    """Returns a value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are valid in TOML's basic strings, except that TOML also escapes DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, BaseModel):
        return toml_value(value.model_dump(exclude_defaults=True))
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        items = ", ".join(
            f"{toml_key(key)} = {toml_value(item)}"
            for key, item in value.items()
            if item is not None  # TOML has no null: not set
        )
        return "{ " + items + " }" if items else "{}"
    return repr(value)


def toml_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)
