"""`overland train`: runs here, one process per device, or joins the world that a launcher made."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overland.cli.common import Settings, split_settings, user_errors
from overland.run_folder import LOGS
from overland.world.signals import STOPPED, end_at_signal

if TYPE_CHECKING:
    import torch

    from overland.config.load import Loaded
    from overland.config.schema import JobConfig
    from overland.training.run import Run
    from overland.world import World
    from overland.world.heartbeat import Heartbeat


@user_errors
def train(
    settings: Settings = None,
    resume: Annotated[
        str | None, typer.Option(help="auto, none, or the path of a checkpoint.")
    ] = None,
    skip_optimizer: Annotated[
        bool, typer.Option("--skip_optimizer", help="Resume with a new optimizer.")
    ] = False,
) -> None:
    """Train a model: overland train CONFIG [section.key=value ...]

    CONFIG is a TOML or YAML file or the name of a recipe (see `overland init`). Run it again to
    resume. Environment: CONFIG_FILE, NGPU, LOG_RANK, COMM_BACKEND, DRY_RUN=1.
    """
    end_at_signal("stopped before the first step; nothing to save")
    from overland.cli.check import report
    from overland.config.arguments import dry_run, ngpu
    from overland.tools.jobs.agent import under_watch
    from overland.world import World
    from overland.world.launchers import export_world, find_world

    source, arguments = split_settings(settings)
    arguments += [f"checkpoint.resume={resume}"] if resume is not None else []
    arguments += ["checkpoint.skip_optimizer=true"] if skip_optimizer else []
    world = find_world()
    if world is not None:
        export_world(world)
    if dry_run(os.environ):
        raise typer.Exit(report(source, arguments, ngpu(os.environ)))
    with under_watch(world or World()) as beat:
        train_here(source, arguments, world, beat)


def train_here(
    source: str | None, arguments: list[str], world: World | None, beat: Heartbeat
) -> None:
    """Trains as one rank of a world, or starts all ranks."""
    from overland.checks import load_checked
    from overland.config.arguments import log_ranks, ngpu
    from overland.world import World
    from overland.world.devices import available_memory, num_local_ranks
    from overland.world.launch import launch_local
    from overland.world.signals import LAUNCHED

    num_ranks = world.size if world else ngpu(os.environ) or num_local_ranks()
    loaded, notes = load_checked(source, arguments, world_size=num_ranks)
    printing = log_ranks(os.environ)
    if (world is None or world.is_first) and LAUNCHED not in os.environ:
        for note in [*loaded.notes, *map(str, notes)]:
            print(f"note: {note}", file=sys.stderr)
    if world is None:
        loaded, arguments = settle_folder(loaded, arguments)
        if not loaded.is_set("job.dump_folder"):
            folder = loaded.config.job.dump_folder
            print(
                f"note: the run folder is {folder}, after the config's name; job.dump_folder sets "
                f"another",
                file=sys.stderr,
            )
        if num_ranks > 1:
            logs = Path(loaded.config.job.dump_folder).expanduser() / LOGS
            words = ["train", *([source] if source else []), *arguments]
            free = available_memory()
            code = launch_local(words, num_ranks, printing, logs)
            if code == 128 + signal.SIGKILL:
                print(killed_in_words(loaded.config, num_ranks, free), file=sys.stderr)
            raise typer.Exit(code)
    run_rank(loaded, world or World(), printing, beat)


def settle_folder(loaded: Loaded, arguments: list[str]) -> tuple[Loaded, list[str]]:
    """The folder is chosen before ranks are started, and handed to them as a setting."""
    from overland.run_folder import fresh_folder

    config = loaded.config
    if config.checkpoint.resume != "none":
        return loaded, arguments
    folder = fresh_folder(config.job.dump_folder)
    arguments = [*arguments, f"job.dump_folder={folder}", "checkpoint.resume=auto"]
    return replace(loaded, config=in_fresh_folder(config, folder)), arguments


def in_fresh_folder(config: JobConfig, folder: str) -> JobConfig:
    """`resume = none` never touches an earlier run: it gets a folder of its own. From there on it
    is a run like any other, whose config.toml must resume it."""
    job = config.job.model_copy(update={"dump_folder": folder})
    checkpoint = config.checkpoint.model_copy(update={"resume": "auto"})
    return config.model_copy(update={"job": job, "checkpoint": checkpoint})


def run_rank(loaded: Loaded, world: World, printing: list[int], beat: Heartbeat) -> None:
    """What every rank does."""
    from overland.errors import Kind
    from overland.parallel.comm import from_first_rank, process_group
    from overland.run_folder import RunFolder, fresh_folder
    from overland.training.owner import owned
    from overland.world.devices import device_type
    from overland.world.heartbeat import Phase
    from overland.world.last_words import say

    config = loaded.config
    beat.enter(Phase.JOINING)
    with process_group(config.comm, world, device_type()) as device:
        if config.checkpoint.resume == "none":
            config = in_fresh_folder(config, from_first_rank(fresh_folder(config.job.dump_folder)))
        folder = RunFolder.of(config).root
        with owned(folder, world.is_first), memory_in_words(config, world, device):
            finished = train_and_tell(config, world, device, printing, beat)
    beat.enter(Phase.FINISHED if finished else Phase.STOPPED)
    if not finished:
        if beat.is_read and world.is_first:
            say(world.rank, Kind.STOPPED, f"step {beat.step}", beat.step)
        raise typer.Exit(STOPPED)


def killed_in_words(config: JobConfig, num_ranks: int, free: float) -> str:
    import torch

    from overland.models.registry import model_config
    from overland.training.out_of_memory import rank_killed
    from overland.world.devices import device_type

    device = torch.device(device_type())
    return rank_killed(config, model_config(config.model), num_ranks, device, free)


@contextmanager
def memory_in_words(config: JobConfig, world: World, device: torch.device) -> Iterator[None]:
    """Turns an error of the allocator into one sentence with ways out."""
    from overland.config.derived import resolve_degrees
    from overland.models.registry import model_config
    from overland.training.out_of_memory import is_out_of_memory, out_of_memory

    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        degrees = resolve_degrees(config.parallelism, world.size, world.local_size)
        raise out_of_memory(config, model_config(config.model), degrees, device) from None


def train_and_tell(
    config: JobConfig, world: World, device: torch.device, printing: list[int], beat: Heartbeat
) -> bool:
    """Whether it got to the last step."""
    from overland.tools.evaluation.sample import SamplesOverTime, sample_start, take_sample
    from overland.training.loop import check_last_save, conclude
    from overland.training.loop import train as train_loop
    from overland.training.run import build_run
    from overland.world.heartbeat import Phase

    beat.enter(Phase.BUILDING)
    run = build_run(config, world, device, printing, beat)
    is_new = run.progress.step < run.config.training.steps
    if config.job.print_config and world.is_first:
        print(run.folder.config.read_text())
    sample_start(run)
    if config.metrics.sample_at_validation:
        run.callbacks.append(SamplesOverTime(run))
    try:
        finished = train_loop(run)
    finally:  # an error on one rank becomes a signal for the others
        end_at_signal("stopped; all that was saved is safe")
    check_last_save(run)
    if finished:
        conclude(run)
    if finished:
        take_sample(run)
    if world.is_first:
        print(closing_words(run, finished, is_new))
    return finished


def closing_words(run: Run, finished: bool, is_new: bool) -> str:
    from overland.tools.evaluation.sample import is_chat, samples_in_words
    from overland.words import command

    folder, steps = run.folder, run.config.training.steps
    if not finished:
        saved = f"saved step {run.progress.step}" if run.config.checkpoint.enable else "not saved"
        if run.beat.is_read:  # in a job
            return f"\nStopped after step {run.progress.step} of {steps}; {saved}."
        return (
            f"\nStopped after step {run.progress.step} of {steps}; {saved}. To go on:\n\n"
            f"  {command('overland', 'train', folder.config)}\n"
        )
    lines = [f"\nFinished: {steps} {'step' if steps == 1 else 'steps'} in {folder.root}."]
    if not is_new:
        lines = [
            f"\nNothing left to do: {folder.root} is at step {run.progress.step} of {steps}. "
            f"`--resume none` starts a new run beside it."
        ]
    tokenizer = run.dataset.tokenizer
    if tokenizer is not None and (said := samples_in_words(run, tokenizer)):
        lines.append(said)
    epochs = run.config.training.epochs
    longer = f"training.steps={2 * steps}" if epochs is None else f"training.epochs={2 * epochs:g}"
    commands = [command("overland", "train", folder.config, longer)]
    if run.config.metrics.enable_tensorboard:
        commands.insert(0, command("tensorboard", "--logdir", folder.tb))
    if run.config.checkpoint.enable and tokenizer is not None:
        asked = is_chat(run.config, tokenizer)
        question = run.config.metrics.sample_prompt or "Who are you?"
        words = ("--chat", question) if asked else ("--prompt", "class Node:")
        commands.insert(0, command("overland", "generate", folder.root, *words))
    lines.append("To try next:\n\n" + "".join(f"  {command}\n" for command in commands))
    return "\n".join(lines)
