"""`overland report`: a page about runs, from their folders alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from overland.cli.common import user_errors

PAGE = "report.html"
SLURM_PATIENCE = 5.0


@user_errors
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN [RUN ...]", help="Run folders.", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="The page; default: report.html in the run folder, or here for several runs.",
            show_default=False,
        ),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write each plot as an SVG.", show_default=False),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers; a page only with --output.")
    ] = False,
) -> None:
    """Write a page about a run, or about several side by side: overland report RUN [RUN ...]

    One HTML file that needs nothing else: curves, sessions, where the time went, data, samples,
    config. It reads the run folders and changes nothing that training uses.
    """
    from overland.progress import progress_bar
    from overland.tools.reporting.run import open_runs
    from overland.tools.reporting.write import numbers_of, write_page, write_plots

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
