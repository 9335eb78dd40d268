"""`overland train`: trains here, one process per device, or as a rank that a launcher started."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from overland.cli.check import report
from overland.cli.common import Settings, print_notes, split_settings, verb
from overland.run_folder import RunFolder, remove_old_stop
from overland.world import World
from overland.world.devices import num_local_ranks
from overland.world.heartbeat import Heartbeat
from overland.world.launchers import export_world, find_world
from overland.world.signals import LAUNCHED, STOPPED, end_at_signal, say_at_signal

if TYPE_CHECKING:
    from overland.config.schema import JobConfig


@verb
def train(
    settings: Settings = None,
    resume: str | None = None,
    skip_optimizer: bool = False,
    skip_optimizer_before: Annotated[  # the spelling of earlier versions
        bool, typer.Option("--skip_optimizer", hidden=True)
    ] = False,
    ranks_per_device: Annotated[int | None, typer.Option(min=1, show_default=False)] = None,
) -> None:
    """Train a model, or resume a run.

    CONFIG is a TOML or YAML file, the name of a recipe (see `overland init`) or a run folder. Run
    the same command again to resume. Environment: CONFIG_FILE, NGPU, LOG_RANK, COMM_BACKEND,
    DRY_RUN=1.

    Args:
        resume: auto, none, or the path of a checkpoint.
        skip_optimizer: Resume with a fresh optimizer.
        ranks_per_device: Number of ranks that share each GPU, to try a layout on fewer GPUs.
    """
    end_at_signal("stopped before the first step; nothing to save")
    from overland.cluster.agent import under_watch
    from overland.config.arguments import dry_run, ngpu

    source, arguments = split_settings(settings)
    arguments += [f"checkpoint.resume={resume}"] if resume is not None else []
    arguments += (
        ["checkpoint.skip_optimizer=true"] if skip_optimizer or skip_optimizer_before else []
    )
    if ranks_per_device is not None:
        arguments.append(f"comm.ranks_per_device={ranks_per_device}")
    world = find_world()
    if world is not None:
        export_world(world)
    if dry_run(os.environ):
        is_here = world is None or world.size == world.local_size
        size = world.size if world else ngpu(os.environ)
        raise typer.Exit(report(source, arguments, size, is_here=is_here))
    with under_watch(world or World()) as beat:
        train_here(source, arguments, world, beat)


def train_here(
    source: str | None, arguments: list[str], world: World | None, beat: Heartbeat
) -> None:
    """Trains as one rank of a world, or starts all ranks."""
    from overland.checks import load_checked
    from overland.config.arguments import log_ranks, ngpu
    from overland.training.main import launch, train_rank, with_fresh_folder

    def ranks_here(config: JobConfig) -> int:
        return ngpu(os.environ) or num_local_ranks(config.comm.ranks_per_device)

    loaded, notes = load_checked(source, arguments, world_size=world.size if world else ranks_here)
    num_ranks = world.size if world else ranks_here(loaded.config)
    printing = log_ranks(os.environ)
    if (world is None or world.is_first) and LAUNCHED not in os.environ:
        print_notes(*loaded.notes_at_start(), *notes)
    if step := saved_step(loaded.config):
        say_at_signal(f"stopped before the next step; step {step} is saved")
    config = loaded.config
    if world is None:
        config = with_fresh_folder(config)
        if not loaded.is_set("job.dump_folder"):
            print_notes(
                f"the run folder is {config.job.dump_folder}, named after the config; set "
                "job.dump_folder to change it"
            )
        root = RunFolder(config).root
        if "SLURM_JOB_ID" not in os.environ and (note := remove_old_stop(root)):
            print_notes(note)
        if num_ranks > 1:
            code, why = launch(config, num_ranks, printing)
            if why:
                print(why, file=sys.stderr)
            raise typer.Exit(code)
    if not train_rank(config, world or World(), printing, beat).finished:
        raise typer.Exit(STOPPED)


def saved_step(config: JobConfig) -> int:
    """Returns the step of the checkpoint that this run resumes; 0 if it starts from the beginning,
    or from a checkpoint that is given by its path."""
    from overland.checkpoint.folder import committed, step_of

    if not config.checkpoint.enable or config.checkpoint.resume != "auto":
        return 0
    found = committed(RunFolder(config).checkpoints)
    return step_of(found[-1]) if found else 0
