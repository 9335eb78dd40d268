"""What the verbs share: settings such as `section.key=value`, shell completion, options made from a
function's arguments and its docstring, and user errors as one sentence with exit code 2.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, get_args, get_origin

import typer

from overland.errors import FULL, OverlandError, sentence
from overland.words import visible
from overland.world.signals import ERRORS

P = ParamSpec("P")
R = TypeVar("R")


def verb(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a verb of a function. What the docstring says about an argument is the help of that
    argument or option. Our own errors and file-system errors are printed as one sentence, with exit
    code 2; anything else is a bug and shows its traceback."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
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

    texts = help_of(function)
    guarded.__doc__ = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")[0]
    plain = inspect.signature(function, eval_str=True).parameters.values()
    parameters = [_with_help(one, texts.get(one.name)) for one in plain]
    guarded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    guarded.__annotations__ = {one.name: one.annotation for one in parameters}
    return guarded


def print_notes(*texts: object) -> None:
    """Prints notes to stderr, a line each."""
    for text in texts:
        print(f"note: {text}", file=sys.stderr)


def is_user_error(error: Exception) -> bool:
    if isinstance(error, OSError):  # no permission, a file where a folder should be, a full disk
        return error.filename is not None or error.errno in FULL
    return isinstance(error, OverlandError)


# Settings are not options: the config loader reads `training.steps=20` and `--training.steps 20`.
TAKES_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
# A line such as `    steps: Number of steps.` below `Args:`, and lines that continue it.
ARGUMENT = re.compile(r"^    (\w+): (.+(?:\n        .+)*)", re.MULTILINE)


def complete_recipe(incomplete: str) -> list[str]:
    """Completes the name of a recipe; where none fits, the shell completes paths."""
    from overland.config.load import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def complete_site(incomplete: str) -> list[str]:
    from overland.cluster.site import site_files

    return [name for name in sorted(site_files()) if name.startswith(incomplete)]


Json = Annotated[bool, typer.Option("--json")]
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


def with_options_of(
    function: Callable[..., Any],
    limits: Mapping[str, int | Sequence[str]],
    without: Sequence[str] = (),
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Gives a verb the arguments of a library function as options, before its own that are only
    keywords: with their names and defaults, and what the docstring says about each. `limits` has
    the least number or the choices of some."""

    def with_options(verb: Callable[..., R]) -> Callable[..., R]:
        own = inspect.signature(verb, eval_str=True).parameters
        texts = help_of(function)
        theirs = inspect.signature(function).parameters.values()
        parameters = [one for one in own.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
        parameters += [_with_help(_option(one, limits.get(one.name)), texts[one.name])
                       for one in theirs
                       if one.name in texts and one.name not in {*own, *without}]  # fmt: skip
        parameters += [one for one in own.values() if one.kind is one.KEYWORD_ONLY]
        verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return verb

    return with_options


def help_of(function: Callable[..., Any]) -> dict[str, str]:
    """Returns what the docstring of a function says about each of its arguments."""
    found = ARGUMENT.finditer(inspect.getdoc(function) or "")
    return {one[1]: " ".join(one[2].split()) for one in found}


def _with_help(one: inspect.Parameter, text: str | None) -> inspect.Parameter:
    """Returns a parameter with its help. It is an option, or an argument if it has no default,
    unless its annotation says which."""
    if text is None:
        return one
    is_annotated = get_origin(one.annotation) is Annotated
    kind, *infos = get_args(one.annotation) if is_annotated else [one.annotation]
    usual = typer.Argument() if one.default is one.empty else typer.Option()
    info = copy(infos[0]) if infos else usual
    info.help = text
    if one.default is False and info.default is ...:  # no name is given; nobody needs --no-joined
        info.param_decls = (f"--{one.name.replace('_', '-')}",)
    return one.replace(annotation=Annotated[kind, info])


def _option(argument: inspect.Parameter, limit: int | Sequence[str] | None) -> inspect.Parameter:
    """Returns an argument of a library function as typer takes it."""
    kind, default = str(argument.annotation), argument.default
    taken: Any = {"int": int, "float": float, "bool": bool}.get(kind.partition(" |")[0], str)
    if "Sequence" in kind:
        taken, default = list[str], None
    elif "Path" in kind:
        taken = Path
    elif isinstance(limit, Sequence):
        taken = Literal.__getitem__(tuple(limit))
    option = typer.Option(min=limit if isinstance(limit, int) else None)
    taken = taken | None if default is None else taken
    return argument.replace(
        kind=argument.KEYWORD_ONLY, annotation=Annotated[taken, option], default=default
    )
