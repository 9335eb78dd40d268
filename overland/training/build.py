"""Builds a run: model, data, optimizer, store, and all that goes with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from overland.checkpoint.adapters import follow
from overland.checkpoint.formats.checkpoint import companions_in
from overland.checkpoint.formats.hf import GENERATION, padding_of
from overland.checkpoint.links import follow_links
from overland.checkpoint.store import Store
from overland.checks.block_order import require_order
from overland.checks.left_out import left_out
from overland.config.derived import optimizer_settings, resolve_degrees
from overland.config.schema import JobConfig
from overland.config.write import write_config
from overland.data.arrays import require_fields
from overland.data.corpus import Corpus
from overland.data.prepare import corpora_of, training_data, validation_data
from overland.data.registry import check_samples
from overland.data.sft import end_of_turn
from overland.data.tokenizer import UNKNOWN, Tokenizer
from overland.errors import CheckpointError, FromFirstRank, sentence
from overland.files import Moved, ignore, replace_file
from overland.kernels import has_triton
from overland.models.flops import casts_samples, sample_fields
from overland.models.init import init_buffers, init_weights
from overland.models.registry import model_config
from overland.models.structure import tie
from overland.objectives import give_objective, objective_for
from overland.objectives.preference import PreferenceLoss
from overland.optimizers.optimizer import Optimizer
from overland.parallel.apply import build_parallel_model, build_parts
from overland.parallel.comm import from_first_rank, sum_over, warm_up
from overland.parallel.mesh import build_mesh
from overland.parallel.sharding import local_part, splits
from overland.run_folder import MODEL_CONFIG, RunFolder
from overland.training.auto import resolve_auto
from overland.training.builtin_callbacks import (
    DeviceSpeed,
    GarbageCollection,
    Profiler,
    SkippedDocuments,
    Timeouts,
)
from overland.training.callbacks import user_callbacks
from overland.training.compile_cache import CompileCache, KernelCache
from overland.training.console import Console
from overland.training.health import LossScaler, SpikeGuard
from overland.training.inner_state import InnerState
from overland.training.metrics import LossPlot, MetricsFile, TensorBoard, WeightsAndBiases
from overland.training.opening import opening
from overland.training.out_of_memory import held_bytes, require_memory
from overland.training.readme import model_name, write_readme
from overland.training.reference import reference_for
from overland.training.resume import preparer_for, start_from
from overland.training.rows import require_separate_rows
from overland.training.run import Callback, Run
from overland.training.schedule import changed_rate, with_steps
from overland.training.screen import Screen
from overland.training.sessions import SessionFile
from overland.training.sparsity import Sparsity
from overland.training.state import saved_state, set_seeds
from overland.training.validate import about_sets
from overland.world import World
from overland.world.heartbeat import Heartbeat, Phase

T = TypeVar("T")


def build_run(
    config: JobConfig,
    world: World,
    device: torch.device,
    log_ranks: Collection[int] = (0,),
    beat: Heartbeat | None = None,
    screen: Screen | None = None,
) -> Run:
    """Builds the model on the meta device, makes it parallel, allocates and initializes it; then
    builds the rest. `screen`: where the run prints; by default, plain lines from `log_ranks`.
    """
    beat = beat or Heartbeat()
    screen = screen or Screen(rank=world.rank, is_shown=world.rank in log_ranks, beat=beat)
    report = screen.print
    set_seeds(config.debug)
    folder = RunFolder.of(config)
    folder.root.mkdir(parents=True, exist_ok=True)
    degrees = resolve_degrees(config.parallelism, world.size, world.local_size)
    mesh = build_mesh(degrees, device.type)
    warm_up(mesh)

    architecture = model_config(config.model)
    rows = config.training.global_batch_size
    rows = config.training.local_batch_size * mesh.dp_size if rows == -1 else rows
    asked = config
    config, decided = resolve_auto(config, architecture, degrees, device)
    if world.is_first and screen.is_shown:
        report(opening(config, world, degrees, architecture, device, folder) + "\n")
    if decided:
        report(decided)
    unchecked = ""
    if degrees.pp > 1:
        unchecked = once_for_all(partial(require_order, architecture, config, degrees))
    if world.is_first:
        for note in left_out(architecture, config):
            report(f"note: {note}")
    parts = build_parts(architecture, mesh, config)
    held = sum_over(torch.tensor(held_bytes(parts, config), dtype=torch.float64, device=device))
    require_memory(
        config, architecture, degrees, device, held.item() / world.size, world.local_size
    )
    materialize(parts, config, device)
    objective = objective_for(config, architecture)
    objective.bind(mesh)
    give_objective(parts, objective)
    num_sums = 1 + len(objective.metrics)
    model = build_parallel_model(parts, mesh, config, rows // mesh.dp_size, device, num_sums)
    optimizer = Optimizer(parts, optimizer_settings(config))
    if unchecked:
        report(f"note: {unchecked}")
    if degrees.tp > world.local_size:
        report(
            f"note: tensor parallelism over {degrees.tp} devices extends beyond a node's "
            f"{world.local_size}; every matrix product will wait for the network"
        )
    place = replace(
        preparer_for(config, folder),
        once=once_for_all,
        tokenizes=world.local_rank == 0,
        report=report,
    )
    fields, vocab_size = sample_fields(architecture), getattr(architecture, "vocab_size", None)
    if fields is not None:  # before a tokenizer is trained on text
        casts = casts_samples(architecture)
        once_for_all(partial(check_samples, config, fields, model_name(config), casts))
    beat.enter(Phase.BUILDING, doing="preparing the data")
    dataset = training_data(config, rows, vocab_size, place, folder.data, writes=world.is_first)
    if dataset.tokenizer is not None:
        place = replace(place, policy=dataset.tokenizer.policy)
        say_padding(dataset.tokenizer, config, report)
    # A pipeline works on a fixed number of rows.
    held_out_rows = 0 if degrees.pp > 1 else config.validation.local_batch_size
    held_out_rows = (held_out_rows or model.rows_per_pass) * mesh.dp_size
    if objective.gathers and not config.validation.local_batch_size:
        held_out_rows = rows  # its loss depends on how many rows it compares
    run = Run(
        config,
        world,
        device,
        folder,
        mesh,
        architecture,
        model,
        objective,
        InnerState(parts, mesh),
        Sparsity(parts, mesh),
        rows,
        optimizer,
        LossScaler(config.training.mixed_precision_param == "float16", device),
        dataset,
        validation_data(config, held_out_rows, vocab_size, place),
        Store(
            folder.checkpoints,
            config.checkpoint,
            device,
            world.local_size,
            beat=beat,
            stall_seconds=config.health.hang_seconds,
        ),
        SpikeGuard(config.health) if config.health.spike_guard != "off" else None,
        beat=beat,
        screen=screen,
    )
    for one in (run.dataset, *run.validation_sets):
        casts = casts_samples(architecture)
        require_fields(one.name, one.rows.arrays, fields, model_name(config), casts)
    beat.enter(Phase.LOADING)
    start_from(run, report)
    counting = "counting the rows in an epoch" if config.training.epochs is not None else ""
    beat.enter(Phase.BUILDING, doing=counting)
    config = run.config = with_steps(config, run.dataset, place)
    for line in about_sets(run):
        report(line)
    if note := changed_rate(run.progress.step, run.resumed_config, config):
        report(f"note: {note}")
    if splits(mesh, config):
        accumulates = rows // mesh.dp_size > config.training.local_batch_size
        reduce = getattr(torch, config.training.mixed_precision_reduce)
        optimizer.split(gradient_dtype=reduce if accumulates else None)
    require_separate_rows(run, report)
    if isinstance(objective, PreferenceLoss) and objective.is_precomputed:
        run.reference = reference_for(run, report)
    if config.checkpoint.enable:
        if config.lora.save_as_peft and world.is_first:
            keep_adapters(run, report)
        if config.checkpoint.link_by_time and world.is_first:
            keep_links(run, report)
        run.store.prepare(saved_state(run))
        for note in run.store.notes:
            report(f"note: {note}")
    beat.enter(Phase.BUILDING, doing="preparing the data")
    if world.is_first:
        if config.training.epochs is None:
            for note in run.dataset.repeats(config.training.steps):
                report(f"note: {note}")
        describe_run(run, asked)
    run.callbacks = build_callbacks(run)
    return run


def keep_adapters(run: Run, report: Callable[[str], None]) -> None:
    """Has rank 0 write the adapters of every checkpoint in PEFT's format, beginning with any that
    an earlier session was killed before writing."""

    def write(newest: Path | None = None, moved: Moved = ignore) -> None:
        in_fallback = run.store.folder == run.folder.fallback
        root = run.store.folder if in_fallback else run.folder.root
        follow(root, run.store.folder, newest, run.store.disk, moved)

    run.store.then.append(write)
    try:
        write()
    except (CheckpointError, OSError) as error:
        report(f"note: {sentence(error)}")


def keep_links(run: Run, report: Callable[[str], None]) -> None:
    """Has rank 0 link every checkpoint under its time as well."""

    def write(newest: Path | None = None, moved: Moved = ignore) -> None:
        follow_links(run.folder.root, run.store.folder, run.store.disk)

    run.store.then.append(write)
    try:
        write()
    except OSError as error:
        report(f"note: {sentence(error)}")


def once_for_all(make: Callable[[], T]) -> T:
    """Calls `make` on rank 0 only, and returns its result, or raises its error, on every rank."""
    value, problem = None, None
    if dist.get_rank() == 0:
        try:
            value = make()
        except Exception as error:
            problem = error
    value, words = from_first_rank((value, str(problem) if problem else ""))
    if problem is not None:
        raise problem
    if words:
        raise FromFirstRank(words)
    return value  # type: ignore[return-value]


def materialize(parts: Sequence[nn.Module], config: JobConfig, device: torch.device) -> None:
    """Allocates parts that were built on the meta device, and initializes their weights and
    buffers."""
    for part in parts:
        part.to_empty(device="cpu" if config.training.enable_cpu_offload else device)
        tie(part)
        init_buffers(part, device)
        if isinstance(getattr(part, "seed", None), int):  # for random numbers that the model draws
            part.seed = config.debug.seed  # type: ignore[assignment]
        init_weights(part, config.debug.seed, local_part)


def describe_run(run: Run, asked: JobConfig) -> None:
    """Writes the files that describe a run folder: config, README, tokenizer, the model's
    config.json."""
    # These apply once: they must not apply again when this config resumes the run.
    once: dict[str, Any] = {"resume": "auto", "skip_optimizer": False, "allow_changes": []}
    again = asked.checkpoint.model_copy(update=once)
    config = asked.model_copy(update={"checkpoint": again})
    write_config(config, run.folder.config, full=True)
    write_readme(run.config, run.world, run.mesh.degrees, run.model_config, run.folder)
    if hasattr(run.model_config, "to_hf"):
        text = json.dumps(run.model_config.to_hf(), indent=2)
        replace_file(run.folder.root / MODEL_CONFIG, text + "\n")
    if run.dataset.tokenizer is not None:
        keep_tokenizer(run.dataset.tokenizer, run.folder.tokenizer, run.config)


def say_padding(tokenizer: Tokenizer, config: JobConfig, report: Callable[[str], None]) -> None:
    """Reports which token is used for padding if the tokenizer of a chat model has none."""
    pad = padding_of(tokenizer)
    if config.sft.shape != "off" and "pad_token" not in tokenizer.named and pad is not None:
        name = tokenizer.pieces([pad])[0]
        report(f"the tokenizer has no padding token; exports will use {name} as pad_token")


def keep_tokenizer(tokenizer: Tokenizer, folder: Path, config: JobConfig) -> None:
    """Copies the tokenizer into the run folder, with the chat template used in training."""
    folder.mkdir(exist_ok=True)
    if tokenizer.path.parent.resolve() == folder.resolve():
        return  # a resumed run opened the copy
    # A model's generation config lies next to its tokenizer, and is copied with it.
    beside = {file.name: file.read_bytes() for file in companions_in(tokenizer.path.parent)}
    files = {**beside, **tokenizer.files()}
    if config.sft.shape != "off" and (end := end_of_turn(config, tokenizer)) is not None:
        about = json.loads(files.get(GENERATION, b"{}"))
        ends = [end] if tokenizer.eos_id is None else [tokenizer.eos_id, end]
        known = about.get("eos_token_id") or []
        known = known if isinstance(known, list) else [known]
        about["eos_token_id"] = list(dict.fromkeys([*known, *ends]))
        files[GENERATION] = json.dumps(about, indent=2).encode()
    for name, data in files.items():
        replace_file(folder / name, data)


def write_plan(run: Run) -> None:
    """Writes the data plan and the paths of its corpora for `overland prove data`, and the number
    of steps for `overland watch`."""
    folder = run.folder.data
    folder.mkdir(exist_ok=True)
    places = corpora_of(run.folder.root)
    for name, corpus in run.dataset.rows.corpora.items():
        if isinstance(corpus, Corpus):
            places[name] = str(corpus.folder.absolute())
    tokenizer = run.dataset.tokenizer
    plan = {
        "fingerprint": run.dataset.plan.fingerprint,
        "plan": run.dataset.plan.to_json(),
        "steps": run.config.training.steps,
        **({"holdout": run.config.data.holdout} if run.config.data.holdout else {}),
        **(tokenizer.policy if tokenizer is not None else UNKNOWN)._asdict(),
    }
    replace_file(run.folder.plan, json.dumps({**plan, "corpora": places}, indent=1) + "\n")


def build_callbacks(run: Run) -> list[Callback]:
    config, first = run.config, run.world.is_first
    wanted: list[tuple[bool, Callable[[Run], Callback]]] = [
        (True, GarbageCollection),
        (True, Timeouts),
        (run.beat.is_supervised, DeviceSpeed),
        (config.compile.enable is True, CompileCache),
        (run.device.type == "cuda" and has_triton(), KernelCache),
        (run.screen.is_shown, Console),
        (first, SkippedDocuments),
        (first, MetricsFile),
        (first, SessionFile),
        (first, LossPlot),
        (first and config.metrics.enable_tensorboard, TensorBoard),
        (first and config.metrics.enable_wandb, WeightsAndBiases),
        (config.profiling.enable_profiling, Profiler),
    ]
    return user_callbacks(run) + [make(run) for ask, make in wanted if ask]
