"""Command lines that work when they are pasted, wherever this installation is."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

WRITTEN_BY = "Written by `overland train`"  # stands in the README.md of every run


def command(*words: object) -> str:
    """A command of this installation, with its arguments, as the shell here must be given it: by
    name if the PATH finds this one, else by its path."""
    name, *rest = map(str, words)
    return " ".join([_program(name), *map(shlex.quote, rest)])


def _program(name: str) -> str:
    here = Path(sys.executable).parent / name  # beside this Python, as pip installs it
    if not here.exists():
        return name if shutil.which(name) else f"{shlex.quote(sys.executable)} -m {name}"
    found = shutil.which(name)
    if found is not None and os.path.realpath(found) == os.path.realpath(here):
        return name
    if here.is_relative_to(Path.cwd()):
        return shlex.quote(str(here.relative_to(Path.cwd())))
    return shlex.quote(str(here))
