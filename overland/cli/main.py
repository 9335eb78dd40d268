"""The `overland` command. Each verb is a thin module that imports heavy packages when it runs."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

import overland
from overland.cli import (
    check,
    config,
    convert,
    data,
    doctor,
    eval,
    generate,
    hub,
    init,
    ls,
    preflight,
    prove,
    report,
    submit,
    train,
    watch,
)
from overland.cli.common import TAKES_SETTINGS
from overland.cli.examples import add_help

app = typer.Typer(
    name="overland",
    help="Train and fine-tune large models on any machine; stop at any point and resume exactly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"overland {overland.__version__}")
        raise typer.Exit


@app.callback()
def every_verb(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def show_help(context: typer.Context) -> None:
    """Prints the list of verbs, for those who leave out the dashes of --help."""
    assert context.parent is not None
    print(context.parent.get_help())


app.command()(init.init)
app.command()(hub.fetch)
app.command(context_settings=TAKES_SETTINGS)(check.check)
app.command(context_settings=TAKES_SETTINGS)(train.train)
app.command(cls=submit.Submit, context_settings=TAKES_SETTINGS)(submit.submit)
app.command(name="ls")(ls.list_runs)
app.command(cls=watch.Watching)(watch.watch)
app.command()(report.report)
app.command(hidden=True)(submit.supervise)
app.command()(submit.env)
app.command()(preflight.preflight)
app.command()(doctor.doctor)
app.command(name="eval")(eval.evaluate)
app.command()(generate.generate)
app.command()(convert.convert)
app.command()(hub.push)
app.command(name="help", hidden=True)(show_help)
app.command(name="version", hidden=True)(lambda: print_version(True))
app.add_typer(data.app, name="data")
app.add_typer(prove.app, name="prove")
app.add_typer(config.app, name="config")
add_help(app)


def main() -> None:
    mend_streams()
    app()


def mend_streams() -> None:
    """Prints `?` for letters that the terminal's encoding lacks, and nothing into a closed stream,
    instead of ending a run."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run(*words: str) -> None:
    """Runs a verb from a script; if the verb fails, the script exits."""
    try:
        app(list(words))
    except SystemExit as end:
        if end.code:
            raise
