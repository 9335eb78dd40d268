"""`overland eval`: measures perplexity and task scores of a model."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from overland.apps.evaluation.main import LIMITS, checked, evaluate_here
from overland.apps.evaluation.main import evaluate as evaluate_in_process
from overland.cli.common import user_errors, with_options_of
from overland.cli.eval_tables import tables
from overland.run_folder import CONFIG, LOGS
from overland.world.signals import end_at_signal

STOPPED_WORDS = "stopped; finished parts are saved, and the same command resumes"


@user_errors
@with_options_of(evaluate_in_process, LIMITS, without=["quiet"])
def evaluate(
    path: Annotated[
        Path,
        typer.Argument(help="A run, a checkpoint of any format, or a Hugging Face folder."),
    ],
    ranks: Annotated[
        int | None,
        typer.Option(help="Processes to start here; default: NGPU, or one per GPU.", min=1),
    ] = None,
    shard: Annotated[
        bool, typer.Option("--shard", help="Shard the parameters over the ranks.")
    ] = False,
    tensor_parallel: Annotated[
        int, typer.Option(help="Number of ranks that split each matrix.", min=1)
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **options: Any,
) -> None:
    """Measure perplexity and scores: overland eval PATH --data c4=/scratch/c4 --tasks hellaswag

    With neither option, a run is evaluated on its own validation data. Results are saved next to
    the checkpoint; run the same command again to resume an evaluation that was stopped.
    """
    end_at_signal(STOPPED_WORDS)
    given = checked({"path": path, **options})
    from overland.config.arguments import log_ranks, ngpu
    from overland.world import World
    from overland.world.launchers import export_world, find_world

    world = find_world()
    if world is not None:
        export_world(world)
    num_ranks = world.size if world is not None else ranks or ngpu(os.environ) or num_devices()
    require_degree(tensor_parallel, num_ranks)
    if world is None and num_ranks > 1:
        printing = log_ranks(os.environ)
        raise typer.Exit(launch(num_ranks, printing, given["path"], given["output"]))

    given |= {"shard": shard, "tensor_parallel": tensor_parallel}
    results = evaluate_here(given, world or World())
    if world is None or world.is_first:
        if as_json:
            print(json.dumps(results, indent=2))
            return
        advises = given["prefix"] == "auto"
        shown = tables(results, is_sweep=given["steps"] is not None, advises=advises)
        print(*shown, sep="\n\n")


def num_devices() -> int:
    """Returns one rank per GPU; on a CPU a single one, which uses all cores."""
    from overland.world.devices import may_have_accelerator

    if not may_have_accelerator():
        return 1
    import torch

    return torch.accelerator.device_count() or 1


def require_degree(tensor_parallel: int, num_ranks: int) -> None:
    from overland.errors import ClusterError

    if num_ranks % tensor_parallel:
        raise ClusterError(
            f"--tensor-parallel {tensor_parallel} does not divide the {num_ranks} ranks; set "
            "their number with --ranks or NGPU"
        )


def launch(num_ranks: int, printing: Sequence[int], path: Path, output: Path | None) -> int:
    """Starts the same command on this many ranks."""
    from overland.apps.evaluation.results import place_of
    from overland.world.launch import launch_local

    path = path.expanduser().absolute()
    around = [one for one in (path, *path.parents[:3]) if (one / CONFIG).is_file()]
    logs = (around[0] if around and not output else place_of(path, None, output)) / LOGS
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError:
        logs = Path(tempfile.mkdtemp(prefix="overland-eval-"))
    return launch_local(sys.argv[1:], num_ranks, printing, logs)
