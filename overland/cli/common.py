"""What the verbs share: parsing of settings, and errors reported in one clear sentence."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import typer

from overland.errors import FULL, OverlandError, sentence
from overland.words import visible
from overland.world.signals import ERRORS

P = ParamSpec("P")
R = TypeVar("R")


def user_errors(verb: Callable[P, R]) -> Callable[P, R]:
    """Prints our own errors and file-system errors as one sentence and exits with 2; anything else
    is a bug and shows its traceback."""

    @functools.wraps(verb)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return verb(*args, **kwargs)
        except Exception as error:
            if not is_user_error(error):
                raise
            # It may quote names from untrusted files, which could hold terminal escape codes.
            words = visible(sentence(error))
            try:
                print(words, file=sys.stderr, flush=True)
            except OSError:  # a log on a full disk; the exit code must still be right
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            if place := os.environ.get(ERRORS):
                with contextlib.suppress(OSError), open(place, "a", encoding="utf-8") as file:
                    file.write(f"{words}\n")
            raise typer.Exit(getattr(error, "exit_code", OverlandError.exit_code)) from None

    return guarded


def is_user_error(error: Exception) -> bool:
    if isinstance(error, OSError):  # no permission, a file where a folder should be, a full disk
        return error.filename is not None or error.errno in FULL
    return isinstance(error, OverlandError)


# Settings are not options: the config loader reads `training.steps=20` and `--training.steps 20`.
TAKES_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def complete_recipe(incomplete: str) -> list[str]:
    """Completes the name of a recipe; where none fits, the shell completes paths."""
    from overland.config.load import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def complete_site(incomplete: str) -> list[str]:
    from overland.cluster.site import site_files

    return [name for name in sorted(site_files()) if name.startswith(incomplete)]


Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG [section.key=value ...]",
        show_default=False,
        autocompletion=complete_recipe,
    ),
]


def split_settings(words: list[str] | None) -> tuple[str | None, list[str]]:
    """Returns CONFIG, if the first word is one, and the remaining words."""
    if words and not words[0].startswith("--") and not is_setting(words[0]):
        return words[0], words[1:]
    return None, list(words or [])


def is_setting(word: str) -> bool:
    """Whether a word is `section.key=value`; a path may have an equals sign, too."""
    key, equals, _ = word.partition("=")
    return bool(equals) and "/" not in key and not Path(word).exists()
