"""`overland prove`: evidence that a run computes what it should."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from overland.cli.errors import user_errors

app = typer.Typer(
    help="Evidence: equal losses across layouts.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def prove() -> None:
    """Evidence: equal losses across layouts."""


@app.command()
@user_errors
def layout(
    config: Annotated[
        str | None, typer.Argument(help="Take the kind of model, recompute and compile from here.")
    ] = None,
    layouts: Annotated[
        str, typer.Option(help="Names such as 'pp2xtp2 cp2+documents', or short, all, five.")
    ] = "short",
    dtype: Annotated[str, typer.Option(help="float64, float32 or bfloat16.")] = "float64",
    steps: Annotated[int, typer.Option(help="Steps to compare.", min=1)] = 20,
    table: Annotated[
        Path | None, typer.Option(help="Also write the table as Markdown, and skip what it holds.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per layout.")] = False,
) -> None:
    """Train a tiny model under each layout on local CPU ranks and compare it with one process."""
    from overland.cluster.pool import RankPool
    from overland.config.errors import ConfigError, Problem, any_of
    from overland.proofs.evidence import Evidence
    from overland.proofs.layout import TOLERANCES, prove_layouts
    from overland.proofs.layouts import FIVE_AXES, LAYOUTS, SHORT, parse_all
    from overland.proofs.settings import settings_of

    if dtype not in TOLERANCES:
        message = f"expected {any_of(list(TOLERANCES))}"
        raise ConfigError([Problem(message, "command line", "--dtype", dtype)])
    try:
        named = {"short": SHORT, "all": LAYOUTS, "five": FIVE_AXES}.get(layouts)
        chosen = named if named is not None else parse_all(layouts)
    except ValueError as error:
        raise ConfigError([Problem(str(error), "command line", "--layouts")]) from None

    evidence = Evidence(table)
    pool = RankPool()
    wrong = 0
    if not as_json:
        print(f"{'layout':<44}{'ranks':>5}  {'loss':>8}  {'norm':>8}  verdict")
    try:
        todo = [one for one in chosen if not evidence.holds(one.name, dtype)]
        for verdict in prove_layouts(todo, pool, dtype, steps, settings_of(config)):
            wrong += not verdict.is_equal
            evidence.add(verdict)
            if as_json:
                print(json.dumps(verdict.to_json()), flush=True)
                continue
            said = "equal" if verdict.is_equal else f"DIFFERS {verdict.error}"
            print(
                f"{verdict.layout:<44}{verdict.ranks:>5}  {verdict.loss_difference:>8.1e}  "
                f"{verdict.norm_difference:>8.1e}  {said}",
                flush=True,
            )
    finally:
        pool.close()
    if not as_json:
        limit = TOLERANCES[dtype]
        print(f"\n{len(todo) - wrong} of {len(todo)} layouts equal one process within {limit:g}.")
    if wrong:
        print(f"{wrong} of {len(todo)} layouts differ from one process.", file=sys.stderr)
        raise typer.Exit(1)
