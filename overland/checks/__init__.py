"""Checks that the schema alone cannot make: values that must fit together, files, models, backends.

Each check is a function from a `Loaded` to problems, listed with the sections or keys it reads. If
one of those could not be parsed (`ConfigError.partial`), the check is skipped, since it would judge
a default instead of what was meant.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from overland.checks import effect, files, hyperparameters, machine, model, parallelism
from overland.checks.model import with_new_tokens
from overland.config.derived import smallest_world
from overland.config.errors import ConfigError, Problem, ProblemKind
from overland.config.load import Loaded, in_order, load_config
from overland.config.schema import JobConfig
from overland.errors import ModelError
from overland.world import devices

Check = Callable[[Loaded], Iterator[Problem]]
SizedCheck = Callable[[Loaded, int | None], Iterator[Problem]]

# custom_import comes first, so that later checks know what it registers.
CHECKS: list[tuple[Check, tuple[str, ...]]] = [
    (model.check_custom_import, ("job.custom_import",)),
    (model.check_model, ("model",)),
    (model.check_export, ("model", "checkpoint.last_save_in_hf")),
    (model.check_adapter, ("model", "lora", "checkpoint.initial_load_path")),
    (model.check_saved_modules, ("model", "lora")),
    (model.check_adapter_files, ("lora", "checkpoint")),
    (model.check_narrow_base, ("lora", "checkpoint", "parallelism", "training.float8")),
    (model.check_freeze, ("model",)),
    (model.check_start, ("model", "checkpoint.initial_load_path")),
    (model.check_length, ("model", "training.seq_len")),
    (model.check_transforms, ("model.transforms", "job.custom_import")),
    (model.check_sparse, ("model", "lora.rank", "training.float8", "preference", "parallelism")),
    (hyperparameters.check_objective, ("model", "training", "parallelism", "validation")),
    (parallelism.check_splits, ("model", "parallelism")),
    (parallelism.check_lengths, ("model", "parallelism", "training.seq_len", "validation")),
    (parallelism.check_grouping, ("data", "parallelism")),
    (hyperparameters.check_units, ("lr_scheduler", "training")),
    (hyperparameters.check_epochs, ("training.epochs", "training.dataset", "data")),
    (hyperparameters.check_sft, ("sft", "data.packing")),
    (hyperparameters.check_warmup, ("lr_scheduler", "training.steps", "training.epochs")),
    (hyperparameters.check_lowest_rate, ("lr_scheduler.min_lr", "optimizer.lr")),
    (hyperparameters.check_optimizer, ("optimizer", "job.custom_import")),
    (hyperparameters.check_groups, ("optimizer.groups", "model", "lora")),
    (hyperparameters.check_moments, ("optimizer.bf16_moments", "training.dtype")),
    (machine.check_recompute, ("activation_checkpoint", "parallelism", "compile")),
    (machine.check_needs_compile, ("activation_checkpoint", "parallelism", "compile")),
    (machine.check_compiler, ("compile",)),
    (machine.check_profiling, ("profiling",)),
    (machine.check_attention, ("model", "data.document_mask", "parallelism", "training", "debug")),
    (effect.check_effect, (*JobConfig.model_fields,)),
    (files.check_paths, (*files.PLACES, "data.datasets")),
    (files.check_place, ("job.dump_folder", "checkpoint")),
    (files.check_allowed_changes, ("checkpoint.allow_changes",)),
    (files.check_saves, ("job.dump_folder", "checkpoint")),
    (files.check_folder, ("job.dump_folder", "model", "training", "data")),
    (files.check_checkpoints, ("checkpoint.resume", "checkpoint.initial_load_path")),
    (files.check_training_data, ("training.dataset", "training.dataset_path", "data")),
    (files.check_validation_data, ("validation", "data")),
    (machine.check_comm_backend, ("comm.backend",)),
    (machine.check_sharing, ("comm", "training.device")),
    (machine.check_algorithms, ("comm.backend",)),
    (machine.check_schedule, ("parallelism",)),
    (machine.check_float8, ("training.float8",)),
    (machine.check_packages, ("metrics.enable_wandb",)),
]
SIZED_CHECKS: list[tuple[SizedCheck, tuple[str, ...]]] = [
    (parallelism.check_degrees, ("parallelism",)),
    (parallelism.check_microbatches, ("parallelism", "training")),
    (
        parallelism.check_batch,
        ("parallelism", "training.local_batch_size", "training.global_batch_size"),
    ),
]


def check_config(loaded: Loaded, world_size: int | None) -> list[Problem]:
    """Returns all problems of a config that loads, and notes.

    Args:
        loaded: The result of `load_config`.
        world_size: Number of processes; None: unknown, so nothing is compared with it.
    """
    problems: list[Problem] = []
    for check, keys in CHECKS:
        ends_it: tuple[type[Exception], ...] = ()
        if "model" in keys:  # which may not be built; `check_model` reports it
            keys, ends_it = (*keys, "job.custom_import"), (ModelError, OSError)
        if not _reads_dropped(loaded, keys):
            with suppress(*ends_it):
                problems += check(loaded)
    return in_order(problems + check_sizes(loaded, world_size))


def check_sizes(loaded: Loaded, world_size: int | None) -> list[Problem]:
    """Returns the problems of degrees and batch sizes with that number of processes."""
    problems: list[Problem] = []
    for sized, keys in SIZED_CHECKS:
        if not _reads_dropped(loaded, keys):
            problems += sized(loaded, world_size)
    return problems


def devices_for(loaded: Loaded) -> tuple[int, Problem | None]:
    """Returns the number of devices to describe a config for: as many as `overland train` would use
    on this machine, or, for a config that does not fit them (with the reason), the fewest that its
    degrees fit on."""
    here = devices.num_local_ranks(loaded.config.comm.ranks_per_device)
    problems = [problem for problem in check_sizes(loaded, here) if problem.kind != "note"]
    return (smallest_world(loaded.config.parallelism), problems[0]) if problems else (here, None)


def require(
    loaded: Loaded, world_size: int | None, waive: Collection[ProblemKind] = ()
) -> list[Problem]:
    """Raises `ConfigError` unless the config can run here; returns notes and what was waived.

    Args:
        loaded: The result of `load_config`.
        world_size: Number of processes, if known.
        waive: Kinds that are returned instead of raised: `overland check` waives "missing" (still
            to be fetched) and, for login nodes, "machine". If there are other problems, missing
            files are raised with them, so that the user sees all of it in one attempt.
    """
    problems = check_config(loaded, world_size)
    waived = [problem for problem in problems if problem.kind in (*waive, "note")]
    if len(waived) < len(problems):
        raise ConfigError(_with_missing(problems, waive), partial=loaded)
    return waived


def load_checked(
    source: str | None,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] = os.environ,
    world_size: int | Callable[[JobConfig], int] | None = None,
    waive: Collection[ProblemKind] = (),
) -> tuple[Loaded, list[Problem]]:
    """Combines `load_config` and `require`, so that the problems of both are reported at once. The
    number of processes may follow from the config."""

    def size_for(found: Loaded) -> int | None:
        return world_size(found.config) if callable(world_size) else world_size

    try:
        loaded = load_config(source, arguments, env)
    except ConfigError as error:
        if not isinstance(error.partial, Loaded):
            raise
        more = _with_missing(check_config(error.partial, size_for(error.partial)), waive)
        raise ConfigError(in_order([*error.problems, *more]), partial=error.partial) from None
    loaded = with_new_tokens(loaded)
    notes = require(loaded, size_for(loaded), waive)
    return effect.without_hidden(loaded), notes


def _with_missing(problems: Sequence[Problem], waive: Collection[ProblemKind]) -> list[Problem]:
    hidden = {*waive, "note"} - {"missing"}
    return [problem for problem in problems if problem.kind not in hidden]


def _reads_dropped(loaded: Loaded, keys: tuple[str, ...]) -> bool:
    dropped = [".".join(path) + "." for path in loaded.dropped]
    return any(name.startswith(f"{key}.") for name in dropped for key in keys)
