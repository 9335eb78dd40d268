"""Refuses settings that would have no effect, because another key hides them or what they belong to
is switched off.

A key that another one hides is an error where the user set both. A section that is switched off
(`enable = false`, a degree of 1) may keep its keys in a file, since people switch it on and off; on
the command line they are errors too. What is set on the command line wins over a file: a key in the
file that it hides is no error, and goes back to its default, so that the config can be written to a
run folder or for a job and loaded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from overland.config.arguments import COMMAND_LINE
from overland.config.errors import NO_VALUE, Problem
from overland.config.fields import all_keys
from overland.config.load import Loaded
from overland.config.schema import JobConfig
from overland.data.wanted import sources_of, taken_by_model
from overland.errors import OverlandError


class HiddenBy(NamedTuple):
    """Keys that have no effect under some condition."""

    keys: tuple[str, ...]
    hidden: Callable[[JobConfig], bool]
    why: str
    by: tuple[str, ...] = ()
    """Keys that, set on the command line, win over these in a file."""
    is_switch: bool = False
    """Whether a file may keep the keys, because something is switched off."""


def while_off(switch: str, *keys: str, why: str = "") -> HiddenBy:
    """Keys of something that is switched off."""
    is_off = lambda config: config.value(switch) in (None, False, "off")
    return HiddenBy(keys, is_off, why or f"set {switch} = true", is_switch=True)


def only_with(
    other: str, *values: str, keys: tuple[str, ...], by: tuple[str, ...] = ()
) -> HiddenBy:
    """Keys that only some values of another key read; the last one is named."""
    is_hidden = lambda config: config.value(other) not in values
    return HiddenBy(keys, is_hidden, f'only {other} = "{values[-1]}" reads it', (other, *by))


def inside(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


def all_but(section: str, *others: str) -> tuple[str, ...]:
    keys = (key for key in all_keys() if key.startswith(f"{section}."))
    return tuple(key for key in keys if key.partition(".")[2] not in others)


def takes(config: JobConfig, arrays: bool) -> bool:
    """Whether the model takes arrays, or tokens; neither is known of one that cannot be built."""
    try:
        return arrays == (taken_by_model(config) is not None)
    except (OverlandError, OSError):  # another check reports it
        return False


def is_all_made(config: JobConfig) -> bool:
    """Whether all training data is generated on the fly."""
    return all(one.is_made for one in sources_of(config).values())


def has_random_images(config: JobConfig) -> bool:
    asked = (one.dataset == "random" for one in sources_of(config).values())
    return config.images.if_missing != "error" or any(asked)


def names_no_set(config: JobConfig) -> bool:
    """Whether validation reads only held-out documents or validation.sets."""
    validation = config.validation
    is_named = validation.dataset is not None or validation.dataset_path is not None
    others = bool(validation.sets or config.data.holdout)
    return bool(validation.enable) and not is_named and others


MADE = "random tokens and generated images"
RULES = [
    # The data
    HiddenBy(
        inside("training", "dataset", "dataset_path", "column", "subset", "split"),
        lambda c: bool(c.data.sources),
        "[data.sources] list all data",
        ("data.sources",),
    ),
    HiddenBy(
        ("training.last_batch",),
        lambda c: c.training.epochs is None,
        "only training.epochs end in the middle of a batch",
        ("training.steps",),
    ),
    HiddenBy(
        ("data.vocab_size",),
        lambda c: c.model.hf_assets_path is not None,
        "model.hf_assets_path names a tokenizer, so none is trained",
        ("model.hf_assets_path", "model.from"),
    ),
    HiddenBy(
        ("data.holdout",),
        lambda c: bool(c.data.holdout) and is_all_made(c),
        f"{MADE} have no documents to hold out",
    ),
    HiddenBy(
        inside("data", "add_bos", "add_eos", "bad_documents"),
        is_all_made,
        f"{MADE} are not read from documents",
        ("training.dataset",),
    ),
    only_with(
        "data.packing", "pack", keys=("data.last_block",), by=("sft.shape", "preference.loss")
    ),
    HiddenBy(
        ("data.document_mask",),
        lambda c: c.data.packing in ("trunc", "overflow"),
        "with this data.packing no sequence has two documents",
        is_switch=True,
    ),
    HiddenBy(
        ("training.seq_len",),
        lambda c: takes(c, arrays=True),
        "each row of this model is one sample of arrays",
        ("model.name",),
    ),
    HiddenBy(
        inside("images", "pad", "instance_norm", "shape", "count", "segment_size", "if_missing"),
        lambda c: takes(c, arrays=False),
        "this model takes tokens, not images",
        ("model.name", "model.from", "model.config"),
    ),
    HiddenBy(
        ("images.shape",),
        lambda c: not has_random_images(c),
        "the images of this config are not random",
        is_switch=True,
    ),
    only_with("checkpoint.full_format", "torch", keys=("images.segment_size",)),
    # The model and its learning rate
    HiddenBy(
        ("model.flavor",),
        lambda c: c.model.config is not None,
        "the architecture comes from model.config or model.from",
        ("model.config", "model.from"),
    ),
    HiddenBy(
        inside("lr_scheduler", "decay_ratio", "min_lr", "min_lr_factor"),
        lambda c: c.lr_scheduler.decay_type == "constant",
        'lr_scheduler.decay_type = "constant" does not decay',
        ("lr_scheduler.decay_type",),
    ),
    HiddenBy(
        ("lr_scheduler.total_steps",),
        lambda c: c.lr_scheduler.decay_type == "constant" and c.lr_scheduler.warmup_ratio is None,
        'lr_scheduler.decay_type = "constant" has no end',
        is_switch=True,
    ),
    # Losses
    only_with("preference.loss", "off", "dpo", keys=("preference.label_smoothing",)),
    only_with("preference.loss", "off", "simpo", keys=("preference.simpo_gamma",)),
    HiddenBy(
        ("preference.reference",),
        lambda c: c.preference.loss not in ("off", "dpo", "ipo"),
        "this preference.loss has no reference model",
        ("preference.loss",),
    ),
    HiddenBy(
        inside("preference", "max_prompt", "prompt_side", "answer_side"),
        lambda c: c.preference.loss != "off" and c.sft.too_long != "truncate",
        'only sft.too_long = "truncate" truncates',
        ("sft.too_long",),
    ),
    # Saving
    HiddenBy(
        ("checkpoint.full_format",),
        lambda c: c.checkpoint.enable and c.checkpoint.type != "full",
        'only checkpoint.type = "full" has formats',
        ("checkpoint.type",),
    ),
    HiddenBy(
        ("checkpoint.keep_every",),
        lambda c: c.checkpoint.keep_latest_k == 0,
        "checkpoint.keep_latest_k = 0 keeps all",
        ("checkpoint.keep_latest_k",),
    ),
    HiddenBy(
        ("lora.save_as_peft",),
        lambda c: not c.checkpoint.enable,
        "nothing is saved; set checkpoint.enable = true",
        ("checkpoint.enable",),
    ),
    while_off(
        "checkpoint.enable",
        *all_but(
            "checkpoint",
            "enable",
            "resume",
            "initial_load_path",
            "last_save_in_hf",
            "export_dtype",
            "stop_after_minutes",
            "walltime_margin_minutes",
            "allow_changes",
            "skip_optimizer",
        ),
        why="nothing is saved; set checkpoint.enable = true",
    ),
    while_off(
        "checkpoint.last_save_in_hf",
        "checkpoint.export_dtype",
        why="nothing is exported; set checkpoint.last_save_in_hf = true",
    ),
    # Validation and samples
    while_off("validation.enable", *all_but("validation", "enable")),
    HiddenBy(
        inside("validation", "column", "subset", "split"),
        names_no_set,
        "they choose a part of validation.dataset or validation.dataset_path, which are not set",
        ("data.holdout",),
    ),
    HiddenBy(
        ("validation.local_batch_size",),
        lambda c: c.parallelism.pipeline_parallel_degree > 1,
        "a pipeline validates with as many rows per pass as it trains with",
        ("parallelism.pipeline_parallel_degree",),
    ),
    HiddenBy(
        ("metrics.sample_at_validation",),
        lambda c: not c.metrics.sample_prompt or not c.validation.enable,
        "it needs metrics.sample_prompt and validation.enable = true",
        ("metrics.sample_prompt", "validation.enable"),
    ),
    # Switches
    HiddenBy(
        ("profiling.enable_memory_snapshot",),
        lambda c: not c.profiling.enable_profiling,
        "set profiling.enable_profiling = true",
        ("profiling.enable_profiling",),
    ),
    while_off(
        "profiling.enable_profiling",
        *all_but("profiling", "enable_profiling", "enable_memory_snapshot"),
    ),
    HiddenBy(
        ("profiling.save_memory_snapshot_folder",),
        lambda c: c.profiling.enable_profiling and not c.profiling.enable_memory_snapshot,
        "set profiling.enable_memory_snapshot = true",
        is_switch=True,
    ),
    while_off("compile.enable", *inside("compile", "backend", "cuda_graphs")),
    while_off("metrics.enable_tensorboard", "metrics.save_tb_folder"),
    while_off(
        "health.spike_guard",
        *inside("health", "spike_threshold", "spike_window"),
        why="health.spike_guard is off",
    ),
    while_off("debug.deterministic", "debug.deterministic_warn_only"),
    HiddenBy(
        ("activation_checkpoint.selective_ac_option",),
        lambda c: c.activation_checkpoint.mode == "auto",
        'set activation_checkpoint.mode = "selective"',
        ("activation_checkpoint.mode",),
    ),
    HiddenBy(
        ("activation_checkpoint.selective_ac_option",),
        lambda c: c.activation_checkpoint.mode not in ("auto", "selective"),
        'only activation_checkpoint.mode = "selective" reads it',
        is_switch=True,
    ),
    HiddenBy(
        ("activation_checkpoint.memory_budget",),
        lambda c: c.activation_checkpoint.mode != "memory_budget",
        'only activation_checkpoint.mode = "memory_budget" reads it',
        is_switch=True,
    ),
    HiddenBy(
        inside("parallelism", "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size"),
        lambda c: c.parallelism.pipeline_parallel_degree == 1,
        "parallelism.pipeline_parallel_degree is 1",
        is_switch=True,
    ),
    HiddenBy(
        ("parallelism.enable_async_tensor_parallel",),
        lambda c: c.parallelism.tensor_parallel_degree == 1,
        "parallelism.tensor_parallel_degree is 1",
        is_switch=True,
    ),
]


def check_effect(loaded: Loaded) -> Iterator[Problem]:
    """Refuses every key that has no effect, by the rules above."""
    for rule, name, value in _hidden(loaded):
        key = all_keys()[name]
        in_file = value != key.default and not rule.is_switch and not _wins(loaded, rule)
        if _is_typed(loaded, name) or in_file:
            shown = NO_VALUE if key.table or key.record else value
            yield loaded.problem(name, f"has no effect: {rule.why}", shown)


def without_hidden(loaded: Loaded) -> Loaded:
    """Returns the config with the defaults of the keys in its file that the command line hides."""
    config = loaded.config
    for rule, name, value in list(_hidden(loaded)):
        key = all_keys()[name]
        if value != key.default and not rule.is_switch and _wins(loaded, rule):
            config = config.having({f"{key.section}.{key.attribute}": key.default})
    return replace(loaded, config=config)


def _hidden(loaded: Loaded) -> Iterator[tuple[HiddenBy, str, Any]]:
    """Yields the keys that are set but hidden, with the rule and their value."""
    for rule in RULES:
        for name in rule.keys if rule.hidden(loaded.config) else ():
            key = all_keys()[name]
            value = loaded.config.value(f"{key.section}.{key.attribute}")
            if value is not None:  # which is how a key is unset
                yield rule, name, value


def _wins(loaded: Loaded, rule: HiddenBy) -> bool:
    return any(_is_typed(loaded, key) for key in rule.by)


def _is_typed(loaded: Loaded, key: str) -> bool:
    """Whether a key is set on the command line, or in the settings of `overland.load_config`."""
    return COMMAND_LINE in loaded.places_of(key)
