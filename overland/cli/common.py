"""What the verbs share: the words after a verb, and errors that end in one clear sentence."""

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Callable
from typing import Annotated, ParamSpec, TypeVar

import typer

from overland.errors import OverlandError, sentence
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
            # Names from foreign files may be in it, which the terminal must not take for commands.
            print(visible(sentence(error)), file=sys.stderr)
            raise typer.Exit(getattr(error, "exit_code", OverlandError.exit_code)) from None

    return guarded


def is_user_error(error: Exception) -> bool:
    if isinstance(error, OSError):  # no permission, a file where a folder should be, a full disk
        return error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, OverlandError)


# Settings are no options: `training.steps=20` and `--training.steps 20` go to the config loader.
TAKES_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="CONFIG [section.key=value ...]", show_default=False),
]


def split_settings(words: list[str] | None) -> tuple[str | None, list[str]]:
    """(CONFIG if the first word is one, the rest)."""
    if words and not words[0].startswith("--") and "=" not in words[0]:
        return words[0], words[1:]
    return None, list(words or [])
