"""Checks everything around a run that can be checked from here: `overland doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """The result of a check: `error` would make a run fail; `warning` may cost time or surprise."""

    what: str
    found: str
    way_out: str = ""
    status: Literal["ok", "warning", "error"] = "ok"


ok = Finding
warning = partial(Finding, status="warning")
failure = partial(Finding, status="error")
