"""Checks the arguments of the public functions: each check returns the argument, or raises an error
that names it."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from overland.errors import ArgumentError


def refused(name: str, given: object, expected: str) -> ArgumentError:
    shown = repr(given)
    shown = shown if len(shown) <= 60 else f"{shown[:59]}…"
    equals = " " if name.startswith("--") else " = "
    return ArgumentError(f"{name}{equals}{shown}: expected {expected}")


def path_of(given: Any, name: str) -> Path:
    """Returns a path, with `~` resolved."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise refused(name, given, "a path")
    return Path(given).expanduser()


def integer(given: Any, name: str, least: int | None = None, most: int | None = None) -> int:
    """Returns an integer, which may be one of numpy, but neither a bool nor 2.0."""
    expected = "an integer" if least is None else f"an integer of {least:,} or more"
    expected = expected if most is None else f"an integer from {least:,} to {most:,}"
    try:
        found = operator.index(given)
    except TypeError:
        raise refused(name, given, expected) from None
    is_outside = (least is not None and found < least) or (most is not None and found > most)
    if isinstance(given, bool) or is_outside:
        raise refused(name, given, expected)
    return found


def texts(
    given: Any, name: str, expected: str = "a string or a list of strings", or_paths: bool = False
) -> list[str]:
    """Returns a list of strings, from one or several; paths count as strings only if the caller
    says so."""
    one: Any = str | os.PathLike if or_paths else str
    several = [given] if isinstance(given, one) else given
    is_list = isinstance(several, Iterable) and not isinstance(several, bytes | Mapping | Set)
    found: list[Any] = list(several) if is_list else [None]
    if not all(isinstance(text, one) for text in found):
        raise refused(name, given, expected)
    return [os.fspath(text) for text in found]
