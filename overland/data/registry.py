"""Data sources by name: built in, or registered by a user's module.

A user's module (`job.custom_import`) can add its own sources with `register_source`. `wanted.py`
opens those that a config names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from overland.data.sources.source import Source, as_source
from overland.errors import DataError
from overland.plugins import plugin

RANDOM = "random"  # random tokens or images
SHAPES, HELD_OUT_SHAPES = "shapes", "shapes_heldout"  # generated images
MADE = (RANDOM, SHAPES, HELD_OUT_SHAPES)
# Part k of n, from 0: stand-ins for the sources of a mixture.
PART = re.compile(r"(stdlib|docstrings):(\d+)/(\d+)")

_sources: dict[str, Callable[[], Any]] = {
    "stdlib": lambda: plugin("standard_library").StandardLibrary(),
    "stdlib_heldout": lambda: plugin("standard_library").StandardLibrary(held_out=True),
    "docstrings": lambda: plugin("docstrings").Docstrings(),
}


def register_source(name: str, open_source: Callable[[], Any] | None = None) -> Any:
    """Makes `training.dataset = NAME` read from the source that `open_source()` returns, which
    has at least `chunks` and `read`. Usable as a decorator: `@register_source(NAME)`."""
    if open_source is None:
        return partial(register_source, name)
    if name in _sources or name in MADE:
        raise DataError(f"a data source named {name!r} is already registered")
    _sources[name] = open_source
    return open_source


def source_names() -> list[str]:
    return [*_sources, *MADE]


def is_built_in(name: str) -> bool:
    return name in source_names() or PART.fullmatch(name) is not None


def registered(name: str) -> Source | None:
    """Opens the source of that name, if there is one."""
    if name in _sources:
        return as_source(_sources[name]())
    if part := PART.fullmatch(name):
        which = int(part[2]), int(part[3])
        if part[1] == "stdlib":
            return as_source(plugin("standard_library").StandardLibrary(part=which))
        return as_source(plugin("docstrings").Docstrings(which))
    return None
