"""`overland supervise`: what a job script runs beside the ranks. Nobody else needs to."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from overland.cli.errors import user_errors


@user_errors
def supervise(
    config: Annotated[Path, typer.Argument(help="As `overland submit` froze it.")],
    launch: Annotated[list[str], typer.Argument(help="srun … python -m overland")],
    nodes: Annotated[int, typer.Option(help="To train on; the others are spares.", min=1)],
    tasks_per_node: Annotated[int, typer.Option(min=1)],
    preflight: Annotated[bool, typer.Option(help="Test all nodes first.")] = True,
    requeue: Annotated[
        bool, typer.Option(help="Go back into the queue when good nodes run out.")
    ] = False,
) -> None:
    """Start, watch and restart the ranks of a job: used by the scripts of `overland submit`."""
    from overland.tools.jobs.supervise.policy import MAX_FAILED_STARTS
    from overland.tools.jobs.supervise.run import Supervised
    from overland.tools.jobs.supervise.supervisor import supervise

    with config.open("rb") as file:
        settings = tomllib.load(file)
    job = Supervised(
        run=Path(settings["job"]["dump_folder"]).expanduser(),
        config=config,
        steps=settings["training"]["steps"],
        launch=launch,
        num_nodes=nodes,
        tasks_per_node=tasks_per_node,
        hang_seconds=settings["health"]["hang_seconds"],
        max_failed_starts=settings["health"].get("max_failed_starts", MAX_FAILED_STARTS),
        margin_seconds=settings["checkpoint"]["walltime_margin_minutes"] * 60,
        checkpoint_folder=settings["checkpoint"]["folder"],
        preflight=preflight,
        requeue=requeue,
    )
    raise typer.Exit(supervise(job))
