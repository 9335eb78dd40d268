"""`overland preflight`: decides where the tests start (in an allocation, under a launcher, or
here), and the exit code; the tests are in `cluster/preflight/`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overland.apps.streams import raw
from overland.cli.common import verb
from overland.cluster.slurm_jobs import srun_on
from overland.errors import ClusterError
from overland.world.devices import num_local_ranks
from overland.world.launchers import find_world

if TYPE_CHECKING:
    from overland.cluster.preflight.conduct import PreflightSettings
    from overland.cluster.preflight.report import Report

BAD = 1


@verb
def preflight(
    config: Annotated[
        str | None, typer.Argument(help="Config whose hash, run folder and backend are tested.")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(help="Test only these nodes of the allocation, e.g. n[1-3,7].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    save: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip collective tests and, on CPU nodes, torch.")
    ] = False,
    task: Annotated[bool, typer.Option("--task", hidden=True)] = False,
) -> None:
    """Test every node, device and link, and name the bad ones.

    Tests an allocation, or this machine. Exit codes: 0 if all are good, 1 if some are bad, 2 if the
    test could not run.
    """
    if task:
        from overland.cluster.preflight.task import run_task

        return run_task()
    from overland.cluster.preflight.conduct import PreflightSettings
    from overland.config.arguments import Arguments
    from overland.config.load import find_source

    path = find_source(config, Arguments(), os.environ)[0] if config else None
    report = run(PreflightSettings.of(path, os.environ, quick), nodes)
    if report is None:  # a rank other than the first
        return
    if save is not None:
        report.save(save)
    print(report.to_json() if as_json else report.table(), file=raw(sys.stdout))  # with colors
    raise typer.Exit(0 if report.is_good else BAD)


def run(
    job: PreflightSettings, only: str | None, env: Mapping[str, str] = os.environ
) -> Report | None:
    """Starts the tasks, or joins those that a launcher has already started."""
    from overland.cluster.preflight import conduct, start
    from overland.config.arguments import ngpu

    world = find_world(env)
    if world is not None and world.size > 1:
        if only is not None:
            raise ClusterError(
                f"--nodes {only}: the launcher has already chosen the nodes; leave out --nodes"
            )
        return conduct.preflight_among_ranks(world, job, env)
    nodes = start.nodes_of(env, only)
    if nodes:
        tasks = start.tasks_per_node(env, job.ranks_per_device)
        launch = srun_on(start.srun_words(tasks, env), nodes, tasks)
        return conduct.preflight(launch, nodes, tasks, job, env)
    return conduct.preflight_here(ngpu(env) or num_local_ranks(job.ranks_per_device), job, env)
