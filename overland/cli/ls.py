"""`overland ls`: lists the runs below a folder."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from overland.cli.common import user_errors

WIDTH_WITHOUT_TERMINAL = 200


@user_errors
def list_runs(
    folder: Annotated[Path, typer.Argument(help="Folder to search, four levels deep.")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List runs, newest first: state, step, loss, validation loss, and age of the last update."""
    from overland.apps.watch.files import finite
    from overland.apps.watch.listing import list_runs, table
    from overland.words import command

    runs = list_runs(folder.expanduser())
    if as_json:
        print(json.dumps([finite(one.to_json()) for one in runs], indent=1))
        return
    if not runs:
        start = command("overland", "train", "quickstart")
        print(f"no runs in {folder} or below it; `{start}` starts one", file=sys.stderr)
        return
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else WIDTH_WITHOUT_TERMINAL
    print(*table(runs, width), sep="\n")
