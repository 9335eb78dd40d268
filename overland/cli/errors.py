"""Errors that are the user's to mend end in one clear sentence each, and exit code 2."""

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from overland.errors import OverlandError
from overland.words import visible

P = ParamSpec("P")
R = TypeVar("R")


def user_errors(verb: Callable[P, R]) -> Callable[P, R]:
    """Prints our own errors, and files the system refuses, and exits with 2; anything else is a
    bug and shows its trace."""

    @functools.wraps(verb)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return verb(*args, **kwargs)
        except Exception as error:
            if not is_user_error(error):
                raise
            print(sentence(error), file=sys.stderr)
            raise typer.Exit(exit_code(error)) from None

    return guarded


def exit_code(error: Exception) -> int:
    return error.exit_code if isinstance(error, OverlandError) else OverlandError.exit_code


def is_user_error(error: Exception) -> bool:
    if isinstance(error, OSError):  # no permission, a file where a folder should be, a full disk
        return error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, OverlandError)


def sentence(error: Exception) -> str:
    """What the user reads. Names from a file of others may be in it, so nothing of it reaches the
    terminal as a command."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        return visible(f"{where}{error.strerror}")
    return visible(str(error))
