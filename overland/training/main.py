"""Trains a run from its config to its closing summary: the single entry point of `overland train`
and `overland.train`.

`launch` starts the ranks of this machine, each of which calls `train_rank`, as does a process that
torchrun, srun or mpirun has started: it joins the others, claims the run folder, builds the run
(`build.py`) and trains it (`loop.py`); then the weights are exported and the summary is printed.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from overland.arguments import integer, path_of, refused, texts
from overland.config.schema import JobConfig
from overland.config.source import KeyPath
from overland.config.validate import validate_again
from overland.errors import Kind, TrainingError
from overland.plugins import plugin
from overland.run_folder import RunFolder, fresh_folder
from overland.words import visible
from overland.world import World
from overland.world.devices import device_type, memory_state
from overland.world.flight_recorder import record_into, take_last_wait
from overland.world.heartbeat import Heartbeat, Phase, reporting
from overland.world.launch import launch_local
from overland.world.launchers import export_world, find_world
from overland.world.signals import STOPPED, say, say_at_signal

if TYPE_CHECKING:
    import torch

    from overland.training.run import Screen


@dataclass(frozen=True)
class Trained:
    """How far a run got."""

    folder: Path
    step: int
    finished: bool
    """Whether it completed its last step; otherwise, training again resumes it."""
    loss: float | None = None
    """The last logged loss."""
    validation: dict[str, float] = field(default_factory=dict)
    """The last loss on each held-out set."""
    checkpoint: Path | None = None
    """The newest checkpoint."""


def load_config(source: str | Path, *settings: str | Sequence[str]) -> JobConfig:
    """Returns the config of a run, checked as far as it can be before it starts.

    Args:
        source: A TOML or YAML file, the name of a recipe (`overland init` lists them), or a run
            folder.
        *settings: Overrides, as on the command line: `"training.steps=20"`, one by one or in lists.

    Raises:
        ConfigError: Lists all problems, one per line. Files that still have to be fetched, and
            anything that only this machine lacks, are only errors in `train`.
    """
    from overland.checks import load_checked

    expected = "strings such as 'training.steps=20'"
    given = [text for one in settings for text in texts(one, "settings", expected)]
    path_of(source, "source")
    return load_checked(str(source), given, waive=("missing", "machine"))[0].config


def train(
    config: JobConfig | str | Path, *, ranks: int | None = None, quiet: bool = False
) -> Trained:
    """Trains or resumes the run that a config describes, and returns how far it got.

    This is `overland train` from Python: it writes a run folder; an interrupt or SIGTERM finishes
    the current step, saves and returns with `finished=False`; and training again resumes.

    Args:
        config: What `overland.load_config` returned, or what it takes: a file, a recipe or a run
            folder. Values that were changed since are checked again.
        ranks: Number of processes to start on this machine; by default this process trains, on one
            device. Under torchrun, mpirun or Slurm this process is already one of the ranks, and
            `ranks` must be omitted.
        quiet: Whether to print nothing.

    Raises:
        ConfigError: The config cannot run here.
        OverlandError: Training failed; the message says why.
    """
    from overland.checks import require
    from overland.config.load import Loaded

    if ranks is not None:
        ranks = integer(ranks, "ranks", least=1)
    if isinstance(config, str | os.PathLike):
        config = load_config(config)
    if not isinstance(config, JobConfig):
        raise refused("config", config, "what overland.load_config returned, or a path")
    config = validate_again(config, "the config")
    world = find_world()
    if world is not None:
        export_world(world)
        if ranks not in (None, world.size):
            raise TrainingError(
                f"ranks = {ranks}, but this process is one of {world.size} that a launcher has "
                "started: omit ranks"
            )
    num_ranks = world.size if world is not None else ranks or 1
    # The folder is intended: loading the config has already rejected any other.
    places: dict[KeyPath, str] = {("job", "dump_folder"): "the config"}
    notes = require(Loaded(config, [], "the config", places), num_ranks)
    if not quiet and (world is None or world.is_first):
        for note in notes:
            print(visible(f"note: {note}"), file=sys.stderr)
    printing = [] if quiet else [0]
    if world is not None or num_ranks == 1:
        return train_rank(config, world or World(), printing)
    config = with_fresh_folder(config)
    folder = RunFolder(config)
    code, why = launch(config, num_ranks, printing)
    if code in (0, STOPPED):
        return trained(folder, finished=code == 0)
    raise TrainingError(
        why or f"the ranks ended with exit code {code}; their output is above and in {folder.logs}"
    )


def launch(config: JobConfig, num_ranks: int, printing: Collection[int]) -> tuple[int, str]:
    """Starts `overland train` on this many processes of this machine, and waits for them. Returns
    their exit code, and why they were killed if they were."""
    from overland.config.write import write_config
    from overland.training.owner import require_free

    folder = RunFolder(config)
    require_free(folder.root)  # before its logs are written to
    with tempfile.TemporaryDirectory(prefix="overland-") as place:
        path = Path(place) / "config.toml"
        write_config(config, path, full=True)
        before = memory_state()
        code = launch_local(["train", str(path)], num_ranks, printing, folder.logs)
    if code != 128 + signal.SIGKILL:
        return code, ""
    from overland.training.fit import rank_killed

    return code, rank_killed(config, num_ranks, device_type(config.training.device), before)


def train_rank(
    config: JobConfig, world: World, printing: Collection[int] = (0,), beat: Heartbeat | None = None
) -> Trained:
    """Trains on this rank."""
    beat, screens = beat or Heartbeat(), plugin("screen")
    beat.enter(Phase.JOINING, doing="" if world.size > 1 else "starting")
    with screens.Screen.of(config, world, printing, beat) as screen:
        result, words = _train_among_ranks(config, world, screen, beat)
    if words and printing:
        try:
            print(visible(words), flush=True)
        except BrokenPipeError:  # everything is saved
            screens.fall_silent()
    beat.enter(Phase.FINISHED if result.finished else Phase.STOPPED)
    if not result.finished and beat.is_supervised and world.is_first:
        say(world.rank, Kind.STOPPED, f"step {beat.step}", beat.step)
    return result


def _train_among_ranks(
    config: JobConfig, world: World, screen: Screen, beat: Heartbeat
) -> tuple[Trained, str]:
    """Joins the other ranks, and claims the run folder."""
    from overland.parallel.comm import from_first_rank, process_group
    from overland.training.fit import memory_in_words
    from overland.training.owner import owned

    kind = device_type(config.training.device)
    logs = RunFolder(config).logs
    if kind == "cuda" and world.size > 1:
        record_into(logs)
    with process_group(config.comm, world, kind) as device:
        if world.is_first and (words := take_last_wait(logs)):
            screen.print(f"note: {words}")
        config = with_fresh_folder(config, from_first_rank)
        folder = RunFolder(config).root
        with (
            reporting(beat),
            owned(folder, world.is_first),
            memory_in_words(config, world, device),
        ):
            return _train(config, world, device, screen, beat)


def _train(
    config: JobConfig, world: World, device: torch.device, screen: Screen, beat: Heartbeat
) -> tuple[Trained, str]:
    """Returns how far the run got and, on the first rank, the closing summary."""
    from overland.training.build import build_run
    from overland.training.loop import conclude
    from overland.training.loop import train as train_loop
    from overland.training.saving import check_last_save

    beat.enter(Phase.BUILDING)
    run = build_run(config, world, device, beat=beat, screen=screen)
    is_new = run.progress.step < run.config.training.steps
    if config.job.print_config and world.is_first:
        screen.print(run.folder.config.read_text())
    samples = plugin("samples")
    samples.sample_start(run)
    if run.config.metrics.sample_at_validation:
        run.callbacks.append(samples.SamplesOverTime(run))
    try:
        finished = train_loop(run)
    finally:  # an error on one rank becomes a signal for the others
        say_at_signal("stopped; everything saved so far is safe")
    check_last_save(run)
    if finished:
        conclude(run)
        beat.enter(Phase.ENDING, doing="writing a sample")
        samples.take_sample(run)
    if not world.is_first:
        return Trained(run.folder.root, run.progress.step, finished), ""
    result = trained(run.folder, finished, run.progress.step)
    return result, plugin("console").closing(run, result, is_new)


def trained(folder: RunFolder, finished: bool, step: int | None = None) -> Trained:
    """Reads from a run folder how far its run got."""
    from overland.checkpoint.folder import committed

    history = plugin("history").History(folder.metrics)
    history.read_on()
    newest, saved = history.newest, committed(folder.checkpoints)
    loss = newest.get("loss")
    return Trained(
        folder.root,
        int(newest.get("step", 0)) if step is None else step,
        finished,
        float(loss) if loss is not None and not math.isnan(loss) else None,
        {name: points[-1][1] for name, points in history.held_out.items() if points},
        saved[-1] if saved else None,
    )


def with_fresh_folder(
    config: JobConfig, agree: Callable[[str], str] = lambda folder: folder
) -> JobConfig:
    """Returns a config with a new run folder for `resume = none`, which never touches an earlier
    run; all ranks `agree` on it. From then on it is a run like any other, and its config.toml must
    resume it."""
    if config.checkpoint.resume != "none":
        return config
    folder = agree(fresh_folder(config.job.dump_folder))
    return config.having({"job.dump_folder": folder, "checkpoint.resume": "auto"})
