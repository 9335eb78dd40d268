"""Translates torchtitan's TOML, of v0.2 (which loads unchanged) and older: which keys of its own
were renamed, and which are ignored or refused, and why.

Works on raw keys, so a file in current keys passes through untouched. Tables say what the keys of
torchtitan that are not ours became, or why they have no effect here; v0.2's keys that are also ours
need no translation. The few that depend on other keys, or are lists, have a function.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from overland.apps.dialects.draft import SAME, Draft, is_one_of, path_of, reason_for
from overland.config.source import Entries, Entry, KeyPath, Translated

HARMLESS = "torchtitan's default values, so nothing is lost"
WEIGHTS_IN_HF = "checkpoint.initial_load_in_hf"
INITIAL_WEIGHTS = "checkpoint.initial_load_path"
ASSETS = "model.hf_assets_path"
NO_CONVERTER = "there are no converters; set training.float8 for float8"
FLOAT8 = {"training.float8": "tensorwise"}


def translate_torchtitan(
    entries: Entries, shown: str, below: Entries, above: Entries
) -> Translated:
    """Returns entries in current keys, notes and problems. The entries will override `below`, and
    `above` will override them."""
    old = {path: entry for path, entry in entries.items() if _is_old(path, entry)}
    draft = Draft({path: e for path, e in entries.items() if path not in old}, shown)
    for path, entry in old.items():
        key = ".".join(path)
        if key in SWITCHES and not draft.expect_bool(key, entry):
            continue
        if key in SPECIAL:
            SPECIAL[key](draft, key, entry)
        elif key in CHANGED:
            draft.change(key, entry, CHANGED[key](entry.value) or {}, HARMLESS)
        elif key in RENAMED:
            draft.move(key, RENAMED[key], entry.value, entry)
        elif key in REFUSED:
            harmless, reason = REFUSED[key]
            same = HARMLESS if is_one_of(entry.value, harmless[:1]) else SAME
            draft.expect(key, entry, harmless, reason, same)
        elif key in IGNORED:
            default, reason = IGNORED[key]
            draft.without_meaning(key, entry, HARMLESS if entry.value == default else reason)
        elif reason := reason_for(path, IGNORED_SECTIONS):
            draft.without_meaning(key, entry, HARMLESS if entry.value is False else reason)
        elif key != WEIGHTS_IN_HF and entry.value != {}:
            draft.refuse(key, entry, UNKNOWN)
    if (asked := old.get(path_of(WEIGHTS_IN_HF))) is not None:
        _weights_from_assets(draft, asked, {**below, **draft.entries, **above})
    return draft.finish(f"{shown}: has keys of torchtitan")


def todays_key(path: KeyPath) -> KeyPath:
    """Returns the current name of a renamed key; any other key is returned unchanged."""
    new = RENAMED.get(".".join(path))
    return path_of(new) if new else path


def _is_old(path: KeyPath, entry: Entry) -> bool:
    key = ".".join(path)
    if key in CHANGED and CHANGED[key](entry.value) is None:
        return False
    tables = (SPECIAL, CHANGED, RENAMED, REFUSED, IGNORED, (WEIGHTS_IN_HF,))
    listed = any(key in table for table in tables) or path[0] in REFUSED_SECTIONS
    return listed or bool(reason_for(path, IGNORED_SECTIONS))


def _flavor(flavor: Any) -> dict[str, Any] | None:
    """Returns what 8B_flex and 8B_varlen are: 8B with attention within documents."""
    size, _, kind = str(flavor).removesuffix("_attn").rpartition("_")
    backend = {"flex": "flex", "varlen": "auto"}.get(kind)
    today = {"model.flavor": size, "model.attention": backend, "data.document_mask": True}
    return today if backend else None


def _tokenizer_folder(file: Any) -> dict[str, Any]:
    """Returns the folder of a tokenizer's file; Meta's own file is in `original/`."""
    if not isinstance(file, str):
        return {}
    folder = PurePosixPath(file)
    if folder.suffix in (".model", ".json") or Path(file).is_file():
        folder = folder.parent
    if folder.name == "original":
        folder = folder.parent
    return {ASSETS: f"./{folder}" if file.startswith("./") else str(folder)}


def _converters(draft: Draft, key: str, entry: Entry) -> None:
    names = _names(entry.value)
    if not names:
        draft.without_meaning(key, entry, HARMLESS)
    for name in names:
        if name in ("quantize.linear.float8", "float8"):
            draft.change(key, entry, FLOAT8)
        elif "grouped_mm" in name:
            draft.became(entry, f'"{name}" in model.converters is ignored: {EXPERTS}')
        elif name.endswith("mx"):
            draft.refuse(key, entry, f'"{name}" is not supported: {MX}; {NO_CONVERTER}')
        else:
            draft.refuse(key, entry, f'"{name}" is not known: {NO_CONVERTER}')


def _interval_type(draft: Draft, key: str, entry: Entry) -> None:
    kind, interval = str(entry.value), draft.entries.get(("checkpoint", "interval"))
    if kind.startswith("step"):
        draft.without_meaning(key, entry, HARMLESS)
    elif interval is not None and kind.startswith("second"):
        if type(interval.value) not in (int, float):
            return  # validation refuses it
        del draft.entries["checkpoint", "interval"]
        draft.put("checkpoint.interval_minutes", interval.value / 60, interval)
        draft.became(entry, "checkpoint.interval in seconds is now checkpoint.interval_minutes")
    else:
        draft.note(
            entry,
            f'{key} = "{kind}" is ignored: checkpoint.interval counts steps, so check its value',
        )


def _exclude_from_loading(draft: Draft, key: str, entry: Entry) -> None:
    names = _names(entry.value)
    others = ", ".join(name for name in names if name != "optimizer")
    if others:
        draft.refuse(key, entry, f"only the optimizer can be excluded from loading, not {others}")
    else:
        today = {"checkpoint.skip_optimizer": True} if names else {}
        draft.change(key, entry, today, HARMLESS)


def _weights_from_assets(draft: Draft, asked: Entry, known: Entries) -> None:
    """With initial_load_in_hf and no path, torchtitan starts from the weights in hf_assets_path."""
    assets = known.get(path_of(ASSETS))
    given = path_of(INITIAL_WEIGHTS) in known or path_of("model.from") in known
    if not draft.expect_bool(WEIGHTS_IN_HF, asked):
        return
    if not asked.value or given:
        draft.without_meaning(WEIGHTS_IN_HF, asked, "the format of the weights is detected")
    elif assets is None:
        reason = f"no weights are given; set {INITIAL_WEIGHTS} to their folder"
        draft.refuse(WEIGHTS_IN_HF, asked, reason)
    else:
        draft.change(WEIGHTS_IN_HF, asked, {INITIAL_WEIGHTS: assets.value})


def _names(value: Any) -> list[str]:
    """Returns a list of names, which older files write as text with commas."""
    names = value if isinstance(value, list) else str(value).split(",")
    return [str(name).strip() for name in names if str(name).strip()]


OLD_NAMES = {"llama": "llama2", "llama3_ft": "llama3"}

SWITCHES = (
    "training.enable_float8_linear", "training.enable_fp8_linear", "training.fp8_linear",
    "float8.enable_float8_linear",
)  # fmt: skip

# Key -> what became of it, from its value; nothing if that is what happens anyway, and None if a
# key that still exists has a value that it still may have.
CHANGED: dict[str, Callable[[Any], dict[str, Any] | None]] = {
    **dict.fromkeys(SWITCHES, lambda on: FLOAT8 if on else {}),
    "model.flavor": _flavor,
    "model.name": lambda name: (
        {"model.name": OLD_NAMES[name]} if is_one_of(name, OLD_NAMES) else None
    ),
    # rmsnorm, fused_rmsnorm and compiled_rmsnorm compute the same; the model refuses unknown norms.
    "model.norm_type": lambda norm: (
        {} if str(norm).endswith("rmsnorm") else {"model.overrides.norm_type": norm}
    ),
    "model.tokenizer_path": _tokenizer_folder,
    "metrics.enable_color_printing": lambda on: {
        "metrics.disable_color_printing": not on if isinstance(on, bool) else on
    },
    "training.checkpoint_folder": lambda folder: (  # the first versions saved nothing without one
        {"checkpoint.enable": False} if folder == "" else {"checkpoint.folder": folder}
    ),
    "activation_checkpoint.selective_ac_option": lambda every: (
        {"activation_checkpoint.selective_ac_option": str(every)} if type(every) is int else None
    ),
    # Copies always go through pinned memory here.
    "checkpoint.async_mode": lambda mode: (
        {"checkpoint.async_mode": "async"} if mode == "async_with_pinned_mem" else None
    ),
}

SPECIAL: dict[str, Callable[[Draft, str, Entry], None]] = {
    "model.converters": _converters,
    "checkpoint.interval_type": _interval_type,
    "checkpoint.exclude_from_loading": _exclude_from_loading,
}

ANY: Any = object()  # no value is harmless: always give the reason

# Older key -> current key, with the same values.
RENAMED: dict[str, str] = {
    "job.print_args": "job.print_config",
    "experimental.custom_import": "job.custom_import",
    "experimental.custom_model_path": "job.custom_import",
    "profiling.run_profiler": "profiling.enable_profiling",
    "profiling.profile_every_x_iter": "profiling.profile_freq",
    "training.batch_size": "training.local_batch_size",
    "training.global_train_batch_size": "training.global_batch_size",
    "training.compile": "compile.enable",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.sequence_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.context_parallel_degree": "parallelism.context_parallel_degree",
    "training.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "training.checkpoint_interval": "checkpoint.interval",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "validation.enabled": "validation.enable",
    "validation.batch_size": "validation.local_batch_size",
}

MX = "float8 uses one scale per tensor, not one per block"
GATHERED = "weights are gathered in training.mixed_precision_param and scaled in every pass"
EXPERTS = "only dense models are supported, without experts"
LOSS_PARALLEL = "the loss is always parallel with tensor parallelism"
COMPILED = "the backward pass is compiled block by block"
ROTATED = "keys and values are always gathered"
FUSED = "the optimizer is always fused"
STAGES = "Overland itself divides the layers among stages, by their cost"
LOADER = "a thread reads ahead (data.read_ahead); there are no loader processes"
FAULTS = "TorchFT is not used; a failed run resumes from its last checkpoint"
ESTIMATE = "`overland check` computes the memory of a step per device"
FLIGHT = (
    "jobs of `overland submit` save PyTorch's flight recorder to the run folder when ranks hang"
)
FULL_SAVE = (
    "every checkpoint is complete, so that it can be resumed; checkpoint.last_save_in_hf also "
    "exports the weights"
)

# Key without effect here -> (torchtitan's default, why). At the default nothing is lost.
IGNORED: dict[str, tuple[Any, str]] = {
    "job.config_file": (ANY, "the file is named on the command line"),
    "job.save_config_file": (ANY, "the resolved config is always saved in the run folder"),
    "job.use_for_integration_test": (ANY, "it is for torchtitan's own tests"),
    "metrics.save_for_all_ranks": (False, "metrics cover the whole run"),
    "metrics.rank_0_only": (True, "metrics cover the whole run"),
    "model.print_after_conversion": (False, "no converter changes the model"),
    "optimizer.implementation": ("fused", FUSED),
    "optimizer.fused": (True, FUSED),
    "optimizer.foreach": (False, FUSED),
    "compile.components": (["model", "loss"], "each block is compiled"),
    "training.gc_debug": (False, "garbage is collected every training.gc_freq steps"),
    "training.data_parallel_type": (ANY, "parallelism.sharding_stage sets its kind"),
    "training.checkpoint_interval_type": ("steps", "checkpoint.interval counts steps"),
    "training.enable_loss_parallel": (True, LOSS_PARALLEL),
    "training.disable_loss_parallel": (False, LOSS_PARALLEL),
    "parallelism.disable_loss_parallel": (False, LOSS_PARALLEL),
    "parallelism.enable_compiled_autograd": (False, COMPILED),
    "parallelism.module_fqns_per_model_part": (None, STAGES),
    "parallelism.pipeline_parallel_first_stage_less_layers": (1, STAGES),
    "parallelism.pipeline_parallel_last_stage_less_layers": (1, STAGES),
    "parallelism.pipeline_parallel_layers_per_stage": (None, STAGES),
    "parallelism.pipeline_parallel_schedule_csv": ("", STAGES),
    "parallelism.pipeline_parallel_microbatches": (None, STAGES),
    "parallelism.pipeline_parallel_split_points": ([], STAGES),
    "parallelism.pipeline_parallel_expert_parallel_overlap": (True, EXPERTS),
    "parallelism.context_parallel_load_balancer": ("headtail", "it always balances head to tail"),
    "parallelism.context_parallel_rotate_method": ("allgather", ROTATED),
    "parallelism.expert_parallel_degree": (1, EXPERTS),
    "parallelism.expert_tensor_parallel_degree": (1, EXPERTS),
    "parallelism.expert_parallel_comm_backend": ("standard", EXPERTS),
    "checkpoint.enable_ft_dataloader_checkpoints": (True, FAULTS),
    "checkpoint.last_save_model_only": (ANY, FULL_SAVE),
    "checkpoint.last_save_model_weights_only": (ANY, FULL_SAVE),
    "checkpoint.model_weights_only": (ANY, FULL_SAVE),
    "checkpoint.enable_first_step_checkpoint": (False, "checkpoint.interval sets when to save"),
    "checkpoint.load_only": (False, "set checkpoint.resume to load; saving continues"),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (ANY, EXPERTS),
    "activation_checkpoint.early_stop": (False, "PyTorch's default is used"),
    "activation_checkpoint.visualize_memory_budget_pareto": (False, "it is not plotted"),
    "activation_checkpoint.preserve_rng_state": (True, "random state is always restored"),
    "activation_checkpoint.determinism_check": ("default", "PyTorch's default is used"),
    "activation_checkpoint.debug": (False, "recomputation has no debug mode"),
    "comm.trace_buf_size": (20000, FLIGHT),
    "comm.save_traces_folder": ("comm_traces", FLIGHT),
    "comm.save_traces_file_prefix": ("rank_", FLIGHT),
    "experimental.enable_compiled_autograd": (False, COMPILED),
    "experimental.pipeline_parallel_split_points": ([], STAGES),
    "experimental.pipeline_parallel_schedule_csv": ("", STAGES),
    "experimental.pipeline_parallel_microbatches": (None, STAGES),
    "experimental.context_parallel_rotate_method": ("allgather", ROTATED),
    "debug.moe_force_load_balance": (False, EXPERTS),
}

for _section in ("training", "validation"):
    IGNORED |= {
        f"{_section}.dataloader.num_workers": (0, LOADER),
        f"{_section}.dataloader.persistent_workers": (False, LOADER),
        f"{_section}.dataloader.pin_memory": (False, LOADER),
        f"{_section}.dataloader.prefetch_factor": (None, LOADER),
    }

# Keys of float8, under both names of the section.
for _section in ("quantize.linear.float8", "float8"):
    IGNORED |= {
        f"{_section}.enable_fsdp_float8_all_gather": (False, GATHERED),
        f"{_section}.precompute_float8_dynamic_scale_for_fsdp": (False, GATHERED),
        f"{_section}.force_recompute_fp8_weight_in_bwd": (False, GATHERED),
        f"{_section}.emulate": (False, "float8 is emulated on CPUs only"),
        f"{_section}.moe_fqns_prototype": ([], EXPERTS),
    }

WEIGHTS_ONLY = (
    "initial_load_path loads only weights; to continue the whole run, set checkpoint.resume to the "
    "path of the checkpoint"
)
FIXED_SCHEMA = (
    "a module cannot add keys or change defaults; remove this key, and set job.custom_import to a "
    "module that registers your model, data or callbacks"
)
# Key that would change what is trained if it were ignored -> (harmless values, the default first;
# what to do about any other value).
REFUSED: dict[str, tuple[list[Any], str]] = {
    "job.custom_config_module": ([""], FIXED_SCHEMA),
    "experimental.custom_args_module": ([""], FIXED_SCHEMA),
    "optimizer.early_step_in_backward": (
        [False],
        "the optimizer steps after the backward pass, once gradients are clipped; remove this key, "
        "and set training.max_norm = 0 to train without clipping, as it does",
    ),
    "checkpoint.initial_load_model_only": ([True], WEIGHTS_ONLY),
    "checkpoint.initial_load_model_weights_only": ([True], WEIGHTS_ONLY),
    "checkpoint.initial_load_in_hf_quantized": ([False], "quantized weights are not supported"),
    "checkpoint.load_step": ([-1], "set checkpoint.resume to the path of that step's checkpoint"),
    "checkpoint.create_seed_checkpoint": (
        [False],
        "no seed checkpoint is needed, and this would start training; remove this key: initial "
        "weights depend on debug.seed, not on the layout",
    ),
    "comm.mode": (
        ["default"],
        "this would start training; remove this key, and check the layout without devices with "
        "DRY_RUN=1 or `overland check`",
    ),
    "fault_tolerance.enable": (
        [False],
        "TorchFT's replica groups are not supported, so each would train on its own; remove this "
        "key and start one run on all devices",
    ),
    "fault_tolerance.semi_sync_method": (
        [None],
        "replicas that train on their own between synchronizations are not supported; every step "
        "is synchronous",
    ),
}

# Layers that are not float8 here either: the head, and parts that no dense model has.
WIDE = [[], ["output"], ["router.gate"], ["output", "router.gate"], ["router.gate", "output"]]
for _section in ("quantize.linear.float8", "float8"):
    REFUSED |= {
        f"{_section}.recipe_name": (
            [None, "tensorwise", ""],
            "float8 uses one scale per tensor; remove this key, and set training.float8 = "
            '"tensorwise"',
        ),
        f"{_section}.filter_fqns": (
            WIDE,
            "float8 applies to all linear layers of the blocks, but not to the head; remove this "
            "key, and set training.float8",
        ),
    }
    for _role in ("input", "weight", "grad_output"):
        REFUSED[f"{_section}.scaling_type_{_role}"] = (
            ["dynamic"],
            "float8 scales are dynamic; remove this key",
        )

# Sections and tables whose (other) keys have no effect here: torchtitan reads them only with a
# converter or a switch that is refused, or for models that are not supported.
IGNORED_SECTIONS: dict[str, str] = {
    "quantize.linear.mx": MX,
    "quantize.grouped_mm": EXPERTS,
    "mx": MX,
    "fault_tolerance": FAULTS,
    "memory_estimation": ESTIMATE,
}

# Sections of torchtitan whose other keys are unknown, so that ignoring them might change what is
# trained.
REFUSED_SECTIONS = frozenset({"quantize", "float8", "experimental"})
UNKNOWN = "this torchtitan key is unknown, and may change what is trained; remove it"
