"""Errors that are the user's to mend end in one clear sentence each, and exit code 2."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

P = ParamSpec("P")
R = TypeVar("R")

# By module and name, so that nothing heavy is imported to compare with.
USER_ERRORS = {
    "ConfigError",
    "DegreeError",
    "DataError",
    "ModelError",
    "CheckpointError",
    "ClusterError",
    "TrainingError",
}


def user_errors(verb: Callable[P, R]) -> Callable[P, R]:
    """Prints our own errors and exits with 2; anything else is a bug and shows its trace."""

    @functools.wraps(verb)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return verb(*args, **kwargs)
        except Exception as error:
            if not is_user_error(error):
                raise
            print(error, file=sys.stderr)
            raise typer.Exit(2) from None

    return guarded


def is_user_error(error: Exception) -> bool:
    return any(
        kind.__name__ in USER_ERRORS and kind.__module__.startswith("overland.")
        for kind in type(error).__mro__
    )
