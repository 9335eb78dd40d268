"""`overland report`: writes an HTML page, SVG plots or JSON about one or more runs, which
`apps/report/` makes from their folders alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from overland.apps.progress import progress_bar
from overland.cli.common import Json, verb

PAGE = "report.html"
SLURM_PATIENCE = 5.0


@verb
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN ...]", show_default=False)],
    output: Annotated[Path | None, typer.Option(show_default=False)] = None,
    svg: Annotated[Path | None, typer.Option(metavar="DIR", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Write an HTML report on one run, or comparing several.

    The page is one self-contained file: curves, sessions, where the time went, data, samples and
    config. It changes nothing that training uses, so it is safe to run during training.

    Args:
        runs: Run folders.
        output: Page to write; default: report.html, in the run folder or (several runs) here.
        svg: Also write each plot as SVG.
        as_json: Print the numbers as JSON; write a page only with --output.
    """
    from overland.apps.report.page import numbers_of, write_page, write_plots
    from overland.apps.report.summary import open_runs

    readers = open_runs(runs)
    for reader in readers:
        with progress_bar(f"reading {reader.name}", "bytes") as bar:
            reader.read_on(bar)
    found = [reader.report(SLURM_PATIENCE) for reader in readers]
    written = []
    if svg is not None:
        written += write_plots(found, svg)
    if output is not None or not as_json:
        page = output or (runs[0] / PAGE if len(runs) == 1 else Path(PAGE))
        written.append(write_page(found, page))
    if as_json:
        print(json.dumps(numbers_of(found), indent=1, allow_nan=False))
        return
    for path in written:
        print(path)
