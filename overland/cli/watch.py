"""Shows runs: `overland watch`, a live view of one run in the terminal, with its keys and exit
codes, or a served page; `overland ls`, which prints a list of runs; and `overland report`, which
writes an HTML page, SVG plots or JSON about one or more runs, made by `apps/report/` from their
folders alone."""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from overland.apps.progress import progress_bar
from overland.apps.streams import SafeConsole
from overland.cli.common import Json, verb
from overland.errors import NoRun

if TYPE_CHECKING:
    from overland.apps.watch.status import Watch

EXIT_CODES = {"stopped": 1, "failed": 1, "silent": 3}
SLURM_PATIENCE = 5.0  # seconds to wait for Slurm, when the state is printed or written once
WIDTH_WITHOUT_TERMINAL = 200
PAGE = "report.html"


class Watching(TyperCommand):
    """Lets `--serve` take a port or stand alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for place, word in enumerate(args):
            behind = args[place + 1] if place + 1 < len(args) else ""
            if word == "--serve" and not behind.isdecimal():
                args = [*args[: place + 1], "0", *args[place + 1 :]]
                break
        return super().parse_args(ctx, args)


@verb
def watch(
    runs: Annotated[list[Path] | None, typer.Argument(metavar="RUN", show_default=False)] = None,
    once: bool = False,
    as_json: Json = False,
    interval: Annotated[float, typer.Option(min=0.1)] = 2.0,
    serve: Annotated[
        int | None, typer.Option(metavar="[PORT]", min=0, max=65535, show_default=False)
    ] = None,
) -> None:
    """Watch a run live, from any machine that can see its folder. Press q to quit.

    With --once, the exit code gives the state: 0 alive or finished, 1 stopped or failed, 2 nothing
    to watch, 3 no sign of life.

    Args:
        runs: The run folder; several with --serve. Default: the newest run below this folder.
        once: Print one frame and exit.
        as_json: One JSON object; implies --once.
        interval: Seconds between refreshes.
        serve: Show the page of `overland report` live, on 127.0.0.1.
    """
    from overland.apps.watch.files import finite
    from overland.apps.watch.listing import newest_run
    from overland.apps.watch.status import Watch
    from overland.apps.watch.view import draw

    if not runs:
        runs = [newest_run(Path())]
        print(f"{runs[0]}: the newest run here; `overland ls` lists all", file=sys.stderr)
    if serve is not None:
        if once or as_json:
            raise typer.BadParameter("--serve shows a live page: leave out --once and --json")
        return serve_page(runs, serve)
    if len(runs) > 1:
        raise NoRun(
            f"{len(runs)} runs were given, and the terminal shows only one; use --serve for several"
        )
    watched = Watch(runs[0])
    if not (once or as_json) and sys.stdout.isatty():
        return follow(watched, interval)
    seen = watched.look(patience=SLURM_PATIENCE)
    if as_json:
        print(json.dumps(finite(asdict(seen)), indent=1))
    else:
        console = SafeConsole()
        console.print(draw(seen, console.width))
    raise typer.Exit(EXIT_CODES.get(seen.state, 0))


def serve_page(runs: list[Path], port: int) -> None:
    """Serves until Ctrl-C."""
    from overland.apps.report.serve import PORT, open_server, tunnel
    from overland.apps.report.summary import open_runs

    with open_server(open_runs(runs), port or PORT) as server:
        print(f"{server.address}\n\nFrom another machine, first run:  {tunnel(server)}\n"
              "Press Ctrl-C to stop.", flush=True)  # fmt: skip
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)


def follow(watched: Watch, interval: float) -> None:
    """Shows the run until it is finished, or until q or Ctrl-C."""
    from rich.live import Live

    from overland.apps.watch.view import draw, finished_words

    console = SafeConsole()
    seen = watched.look()
    try:
        with (
            Live(console=console, screen=True, auto_refresh=False) as live,
            keyboard() as pressed,
        ):
            while True:
                height = max(4, min(12, console.height - 18))
                live.update(draw(seen, console.width, height), refresh=True)
                if seen.state == "finished" or pressed("q", interval):
                    break
                seen = watched.look()
    except KeyboardInterrupt:
        pass
    console.print(draw(seen, console.width))  # the live screen is cleared on exit
    if seen.state == "finished":
        print(f"\n{finished_words(seen)}")


@contextmanager
def keyboard() -> Iterator[Callable[[str, float], bool]]:
    """Yields a function that waits some seconds and returns whether a key was pressed meanwhile."""
    import termios
    import tty

    watched = [sys.stdin] if sys.stdin.isatty() else []
    before = [termios.tcgetattr(one) for one in watched]
    for one in watched:
        tty.setcbreak(one)

    def pressed(key: str, seconds: float) -> bool:
        ready, _, _ = select.select(watched, [], [], seconds)
        return bool(ready) and key in os.read(sys.stdin.fileno(), 64).decode().lower()

    try:
        yield pressed
    finally:
        for one, attributes in zip(watched, before, strict=True):
            termios.tcsetattr(one, termios.TCSADRAIN, attributes)


@verb
def list_runs(
    folder: Annotated[Path, typer.Argument()] = Path("."),
    as_json: Json = False,
) -> None:
    """List runs with their state, step, loss and age. Newest first, also with validation loss.

    Args:
        folder: Folder to search, four levels deep.
        as_json: Print a JSON list.
    """
    from overland.apps.watch.files import finite
    from overland.apps.watch.listing import list_runs, no_runs, table, to_json

    runs = list_runs(folder.expanduser())
    if as_json:
        print(json.dumps([finite(to_json(one)) for one in runs], indent=1))
        return
    if not runs:
        print(no_runs(folder), file=sys.stderr)
        return
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else WIDTH_WITHOUT_TERMINAL
    print(*table(runs, width), sep="\n")


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
