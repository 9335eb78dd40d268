"""The public functions, as a program calls them: errors name their arguments, and not the options
of the command that does the same; and arguments that may be left out."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from overland.arguments import integer, path_of, refused
from overland.errors import ArgumentError, OverlandError
from overland.words import did_you_mean

Function = TypeVar("Function", bound=Callable[..., Any])
OPTION = re.compile(r"`[^`]*`|\boverland [a-z]+ .*|(?<![\w-])--([a-z][a-z-]*)")
"""An option of a command, outside of a command that a message shows."""
LOADING = ("base", "config", "device", "dtype", "step", "tokenizer")
KINDS = {"bool": (bool, "True or False"), "str": (str, "a text")}
"""Types that are checked for every public function: any text would be true."""


def naming_arguments(function: Function, name: str) -> Function:
    """Returns a public function whose errors name its arguments, and not the options of the command
    that does the same."""

    @functools.wraps(function)
    def public(*given: Any, **named: Any) -> Any:
        _check_kinds(function, name, given, named)
        try:
            return function(*given, **named)
        except OverlandError as error:
            if len(error.args) == 1 and isinstance(error.args[0], str):
                known = inspect.signature(function).parameters
                error.args = (_with_arguments(error.args[0], known),)
            raise

    public.__module__, public.__qualname__ = "overland", name  # where pickle finds it
    return public  # type: ignore[return-value]


def _check_kinds(
    function: Callable[..., Any], name: str, given: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    signature = inspect.signature(function)
    known = signature.parameters
    if all(one.kind is not one.VAR_KEYWORD for one in known.values()):
        for one in named.keys() - known.keys():
            raise ArgumentError(f"{name} has no argument {one!r}{did_you_mean(one, known)}")
    try:
        values = signature.bind_partial(*given, **named).arguments
    except TypeError:  # the function itself says what is wrong
        return
    for one, value in values.items():
        annotation = str(known[one].annotation)
        kind, expected = KINDS.get(annotation.removesuffix(" | None"), (object, ""))
        may_be_none = value is None and annotation.endswith("None")
        if not isinstance(value, kind) and not may_be_none:
            raise refused(one, value, expected)


def _with_arguments(message: str, known: Collection[str]) -> str:
    def argument(found: re.Match[str]) -> str:
        name = (found[1] or "").replace("-", "_")
        if name in LOADING and name not in known:  # the model was opened before
            return f"`{name}` of load_model"
        return f"`{name}`" if name in known else found[0]

    return OPTION.sub(argument, message)


def path_or_none(given: Any, name: str) -> Path | None:
    return None if given is None else path_of(given, name)


def integer_or_none(given: Any, name: str, least: int) -> int | None:
    return None if given is None else integer(given, name, least)


def number(given: Any, name: str) -> float:
    """Returns a number, which may be one of numpy, but not a bool or a text."""
    if not hasattr(given, "__float__") or isinstance(given, bool):
        raise refused(name, given, "a number")
    return float(given)
