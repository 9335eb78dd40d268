"""Builds a run: its model, optimizer, data and store, the number of steps if epochs are set, the
state that it starts from, and its callbacks. The model is built on the meta device, made parallel
and then allocated."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from overland.checkpoint.store import Store
from overland.checks.own_model import left_out, require_order
from overland.config.derived import model_name, optimizer_settings, resolve_degrees, rows_per_step
from overland.config.schema import JobConfig, Training
from overland.data.arrays import require_fields
from overland.data.blocks import BlockStream
from overland.data.corpora import Preparer
from overland.data.prepare import Dataset, training_data, validation_data
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError
from overland.models.flops import casts_samples, sample_fields
from overland.models.init import init_buffers, init_weights
from overland.models.registry import model_config
from overland.models.structure import tie
from overland.objectives import give_objective, objective_for
from overland.objectives.objective import Objective
from overland.optimizers.optimizer import Optimizer
from overland.parallel.apply import ParallelModel, build_parallel_model, build_parts
from overland.parallel.comm import once_for_all, sum_over, warm_up
from overland.parallel.mesh import Mesh, build_mesh
from overland.parallel.sharding import local_part, splits
from overland.plugins import plugin
from overland.run_folder import RunFolder
from overland.training.callbacks import (
    CompileCache,
    DeviceSpeed,
    GarbageCollection,
    Profiler,
    SkippedDocuments,
    Timeouts,
    user_callbacks,
)
from overland.training.fit import held_bytes, require_memory, resolve_auto
from overland.training.health import LossScaler, SpikeGuard
from overland.training.inner_state import InnerState
from overland.training.kernel_trials import choose_kernels
from overland.training.records import MetricsFile, SessionFile, describe_run
from overland.training.reference import reference_for
from overland.training.resume import preparer_for, start_from
from overland.training.run import Callback, Run, Screen
from overland.training.saving import prepare_saves
from overland.training.schedule import changed_rate
from overland.training.state import set_seeds
from overland.training.validate import about_sets
from overland.words import number_of
from overland.world import World
from overland.world.heartbeat import Heartbeat, Phase

Report = Callable[[str], None]

ROUND_SECONDS = 10.0  # of counting, between messages to the waiting ranks: no collective times out


def build_run(
    config: JobConfig,
    world: World,
    device: torch.device,
    *,
    log_ranks: Collection[int] = (0,),
    beat: Heartbeat | None = None,
    screen: Screen | None = None,
) -> Run:
    """Builds a run that is ready for its first step, or for the next one of a run that is resumed.
    `screen`: where it prints; by default, plain lines from `log_ranks`."""
    asked, beat = config, beat or Heartbeat()
    if screen is None:
        is_shown = world.rank in log_ranks
        screen = plugin("screen").Screen(rank=world.rank, is_shown=is_shown, beat=beat)
    report = screen.print
    set_seeds(config.debug)
    folder = RunFolder(config)
    folder.root.mkdir(parents=True, exist_ok=True)
    degrees = resolve_degrees(config.parallelism, world.size, world.local_size)
    mesh = build_mesh(degrees, device.type, config.comm.init_timeout_seconds)
    warm_up(mesh)

    if note := choose_kernels(config, device):
        report(f"note: {note}")
    architecture = model_config(config.model)
    config, decided = resolve_auto(config, architecture, degrees, device)
    if world.is_first and screen.is_shown:
        report(plugin("console").opening(config, world, degrees, architecture, device) + "\n")
    if decided:
        report(decided)
    for note in notes_on_layout(config, world, mesh, architecture):
        report(f"note: {note}")

    objective = objective_for(config, architecture)
    objective.bind(mesh)
    parts = allocated_parts(config, world, mesh, architecture, device)
    give_objective(parts, objective)
    rows = rows_per_step(config.training, mesh.dp_size)
    num_sums = 1 + len(objective.metrics)
    model = build_parallel_model(parts, mesh, config, rows // mesh.dp_size, device, num_sums)
    optimizer = Optimizer(parts, optimizer_settings(config))

    preparer = replace(
        preparer_for(config, folder),
        once=once_for_all,
        tokenizes=world.local_rank == 0,
        report=report,
    )
    fields, vocab_size = sample_fields(architecture), getattr(architecture, "vocab_size", None)
    casts = casts_samples(architecture)
    beat.enter(Phase.BUILDING, doing="preparing the data")
    dataset = training_data(config, rows, vocab_size, preparer, folder.data, writes=world.is_first)
    if dataset.tokenizer is not None:
        preparer = replace(preparer, policy=dataset.tokenizer.policy)
        say_padding(dataset.tokenizer, config, report)
    held_out_rows = rows_held_out(config, model, objective, mesh)
    validation_sets = validation_data(config, held_out_rows, vocab_size, preparer)
    for one in (dataset, *validation_sets):
        require_fields(one.name, one.rows.arrays, fields, model_name(config), casts)

    run = Run(
        config=config,
        world=world,
        device=device,
        folder=folder,
        mesh=mesh,
        model_config=architecture,
        model=model,
        objective=objective,
        inner=InnerState(parts, mesh),
        global_batch_size=rows,
        optimizer=optimizer,
        scaler=LossScaler(config.training.mixed_precision_param == "float16", device),
        dataset=dataset,
        validation_sets=validation_sets,
        store=Store(
            folder.checkpoints,
            config.checkpoint,
            device,
            world.local_size,
            beat=beat,
            stall_seconds=config.health.hang_seconds,
        ),
        guard=SpikeGuard(config.health) if config.health.spike_guard != "off" else None,
        beat=beat,
        screen=screen,
    )
    beat.enter(Phase.LOADING)
    start_from(run, report)
    counting = "counting the rows in an epoch" if config.training.epochs is not None else ""
    beat.enter(Phase.BUILDING, doing=counting)
    run.config = with_steps(config, run.dataset, preparer)
    make_ready(run, report)
    beat.enter(Phase.BUILDING, doing="preparing the data")
    if world.is_first:
        describe_run(run, asked)
    run.callbacks = build_callbacks(run)
    return run


def notes_on_layout(config: JobConfig, world: World, mesh: Mesh, architecture: Any) -> list[str]:
    """Returns what the user should know before the model is built; raises if a pipeline would
    change it."""
    degrees, notes = mesh.degrees, []
    if degrees.pp > 1:
        notes.append(once_for_all(partial(require_order, architecture, config, degrees)))
    if world.is_first:
        notes += left_out(architecture, config)
    if degrees.tp > world.local_size:
        notes.append(
            f"tensor parallelism over {degrees.tp} devices extends beyond a node's "
            f"{world.local_size}; every matrix product will wait for the network"
        )
    return [note for note in notes if note]


def allocated_parts(
    config: JobConfig, world: World, mesh: Mesh, architecture: Any, device: torch.device
) -> list[nn.Module]:
    """Returns this rank's parts of the model, with their initial weights; raises before anything is
    allocated if there is too little memory."""
    parts = build_parts(architecture, mesh, config)
    held = sum_over(torch.tensor(held_bytes(parts, config), dtype=torch.float64, device=device))
    mean = held.item() / world.size
    require_memory(config, architecture, mesh.degrees, device, mean, world.local_size)
    allocate(parts, config, device)
    return parts


def allocate(parts: Sequence[nn.Module], config: JobConfig, device: torch.device) -> None:
    """Allocates parts that were built on the meta device, and initializes their weights and
    buffers."""
    for part in parts:
        part.to_empty(device="cpu" if config.training.enable_cpu_offload else device)
        tie(part)
        init_buffers(part, device)
        if isinstance(getattr(part, "seed", None), int):  # for random numbers that the model draws
            part.seed = config.debug.seed  # type: ignore[assignment]
        init_weights(part, config.debug.seed, local_part)


def rows_held_out(config: JobConfig, model: ParallelModel, objective: Objective, mesh: Mesh) -> int:
    """Returns the size of a batch of validation."""
    asked = config.validation.local_batch_size
    if objective.gathers and not asked:  # its loss depends on how many rows it compares
        return rows_per_step(config.training, mesh.dp_size)
    if mesh.degrees.pp > 1:  # a pipeline works on a fixed number of rows
        asked = None
    return (asked or model.rows_per_pass) * mesh.dp_size


def say_padding(tokenizer: Tokenizer, config: JobConfig, report: Report) -> None:
    """Reports which token is used for padding if the tokenizer of a chat model has none."""
    pad = tokenizer.pad_id
    if config.sft.shape != "off" and "pad_token" not in tokenizer.named and pad is not None:
        name = tokenizer.pieces([pad])[0]
        report(f"the tokenizer has no padding token; exports will use {name} as pad_token")


def with_steps(config: JobConfig, dataset: Dataset, place: Preparer) -> JobConfig:
    """Returns the config with `training.steps` filled in if it asks for epochs.

    The batches in the data are counted before training starts. If windows of text are packed, the
    number of rows depends on their tokens, so all of the text is tokenized once. The shards are
    kept, and so are the counts, in the run folder, where a resumed run reads them.
    """
    training = config.training
    if training.epochs is None:
        return config
    while not place.once(lambda: count_windows(dataset, training.epochs or 0, place.report)):
        pass
    steps = place.once(lambda: num_steps(dataset, training))
    name = source_name(dataset)
    place.report(f"training.epochs = {training.epochs:g} of {name} is {number_of(steps, 'step')}")
    schedule = config.lr_scheduler
    total = schedule.total_steps or steps
    if (warmup := schedule.warmup(total)) > min(steps, total):
        place.report(
            f"the run ends during its warm-up of {warmup:,} steps, below the peak learning rate: "
            "set lr_scheduler.warmup_ratio, such as 0.03, instead of warmup_steps"
        )
    return config.having({"training.steps": steps})


def num_steps(dataset: Dataset, training: Training) -> int:
    assert training.epochs is not None
    rows = dataset.rows
    steps = rows.num_batches(training.epochs, drop=training.last_batch == "drop")
    if steps < 1:
        size = rows.plan.segments[-1].global_batch_size
        raise DataError(
            f"training.epochs = {training.epochs:g} of {source_name(dataset)} does not fill one "
            f'batch of {size:,} rows: set training.last_batch = "pad", or lower '
            "training.global_batch_size"
        )
    return steps


def source_name(dataset: Dataset) -> str:
    """Returns the name of the one source that is read."""
    return next(name for name, weight in dataset.plan.segments[-1].weights.items() if weight)


def count_windows(dataset: Dataset, epochs: float, report: Callable[[str], None]) -> bool:
    """Counts the rows of windows for up to `ROUND_SECONDS`; returns whether all were counted."""
    started = time.monotonic()
    for lane in dataset.rows.lanes(dataset.plan.segments[-1].first_batch).lanes:
        if not isinstance(lane, BlockStream):
            continue
        total = lane.windows_before(-int(-epochs // 1))
        for window in range(lane.num_counted, total):
            lane.num_blocks(window + 1)
            if time.monotonic() - started > ROUND_SECONDS:
                report(f"counting rows for training.epochs: {window + 1:,} of {total:,} windows")
                return False
    return True


def make_ready(run: Run, report: Report) -> None:
    """Does what comes between the state of a run and its first step."""
    config, mesh = run.config, run.mesh
    for line in about_sets(run):
        report(line)
    if note := changed_rate(run.progress.step, run.resumed_config, config):
        report(f"note: {note}")
    if splits(mesh, config):
        accumulates = run.global_batch_size // mesh.dp_size > config.training.local_batch_size
        reduce = getattr(torch, config.training.mixed_precision_reduce)
        run.optimizer.split(gradient_dtype=reduce if accumulates else None)
    plugin("separate_rows").require_separate_rows(run, report)
    if run.objective.is_precomputed:
        run.reference = reference_for(run, report)
    if config.checkpoint.enable:
        prepare_saves(run, report)


def build_callbacks(run: Run) -> list[Callback]:
    config, first = run.config, run.world.is_first
    wanted: list[tuple[bool, Callable[[Run], Callback]]] = [
        (True, GarbageCollection),
        (True, Timeouts),
        (run.beat.is_supervised, DeviceSpeed),
        (config.compile.enable is True, CompileCache),
        (first, SkippedDocuments),
        (first, MetricsFile),
        (first, SessionFile),
        (config.profiling.enable_profiling, Profiler),
    ]
    built_in = [make(run) for is_wanted, make in wanted if is_wanted]
    shown: list[Callback] = plugin("console").callbacks(run)
    return [*user_callbacks(run), *built_in, *shown]
