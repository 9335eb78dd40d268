"""Checks everything around a run that can be checked from here: `overland doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """The result of a check: `error` would make a run fail; `warning` may cost time or surprise."""

    what: str
    status: Literal["ok", "warning", "error"]
    found: str
    way_out: str = ""


def ok(what: str, found: str) -> Finding:
    return Finding(what, "ok", found)


def warning(what: str, found: str, way_out: str) -> Finding:
    return Finding(what, "warning", found, way_out)


def failure(what: str, found: str, way_out: str) -> Finding:
    return Finding(what, "error", found, way_out)
