"""The YAML of the training stub: `dist`, `dataset`, `model.hf_config`, `optim`, … of a ViT-MAE.

The stub trains a masked autoencoder. Its dataset paths are lists of images, or placeholders: if
they do not exist, it trains on random tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath

from overland.apps.dialects.draft import Draft, is_one_of
from overland.config.source import Entries, Entry, KeyPath, Translated
from overland.words import any_of

OWN_SECTIONS = frozenset({"dist", "dataset", "optim", "loss", "misc", "logging"})
OTHER_SECTIONS = frozenset({"model", "lr_scheduler", "checkpoint"})

HOME = {"dist": "comm", "optim": "optimizer", "loss": "training"}

RENAMED: dict[str, str] = {
    "dist.backend": "comm.backend",
    "dist.dtype": "training.mixed_precision_param",
    "dist.sharding_stage": "parallelism.sharding_stage",
    "misc.sharding_stage": "parallelism.sharding_stage",
    "misc.compiles_model": "compile.enable",
    "misc.max_epochs": "training.epochs",
    "misc.max_eval_iter": "validation.steps",
    "misc.peak_flops_per_sec": "metrics.peak_flops",
    "dataset.batch_size": "training.local_batch_size",
    "dataset.path_train": "training.dataset_path",
    "dataset.path_eval": "validation.dataset_path",
    "dataset.seg_size": "images.segment_size",
    "dataset.input.total_size": "images.count",
    "optim.lr": "optimizer.lr",
    "optim.weight_decay": "optimizer.weight_decay",
    "optim.beta1": "optimizer.beta1",
    "optim.beta2": "optimizer.beta2",
    "optim.grad_clip": "training.max_norm",
    "lr_scheduler.warmup_iterations": "lr_scheduler.warmup_steps",
    "lr_scheduler.min_lr": "lr_scheduler.min_lr",
    "checkpoint.preempt_chkpt_saving_iterations": "checkpoint.preempt_interval",
    "checkpoint.path_chkpt_prev": "checkpoint.resume",
    "checkpoint.pretrain": "checkpoint.initial_load_path",
}

TRANSFORMS = "these transforms are disabled"
LOADER = "a thread reads ahead (data.read_ahead); there are no loader processes"
WHOLE = "checkpoints are sharded and complete, and any number of devices can load them"
UNSET = "null has no effect"
HF_CONFIG = ("model", "hf_config")
FLAVOR, CHANNELS = "base", 3  # ViTMAEConfig's defaults
# Keys of hf_config that everyone should know the value of.
SIZES = (
    "image_size", "patch_size", "num_channels", "hidden_size", "num_hidden_layers",
    "num_attention_heads", "intermediate_size", "decoder_hidden_size",
    "decoder_num_hidden_layers", "decoder_num_attention_heads", "decoder_intermediate_size",
)  # fmt: skip
TRANSFORM_SET = ("dataset", "transforms", "set")
NORMS = ("instance_norm", "uses_instance_norm")
DROPS = ("drop_last", "drop_last_in_sampler", "drop_last_in_loader")
STATE_DICTS = ("full", "sharded", "shard", "local")
SWITCHES = frozenset(
    {"dist.cpu_only", "misc.cpu_only", "misc.uses_mixed_precision", "model.from_scratch"}
    | {f"dataset.{name}" for name in DROPS}
)
NEVER = 1_000_000_000  # steps between saves
LOGS = "metrics and logs go to the run folder (job.dump_folder)"

# Key, section or table -> why it has no effect. The longest match counts.
WITHOUT_MEANING: dict[str, str] = {
    "dist.uses_unique_world_seed": "debug.seed determines all random numbers",
    "dataset.transforms": TRANSFORMS,
    "dataset.num_channels": "model.overrides.num_channels sets it",
    "dataset.cache_size": LOADER,
    "dataset.debug": LOGS,
    "dataset.num_workers": LOADER,
    "dataset.pin_memory": LOADER,
    "dataset.prefetch_factor": LOADER,
    "checkpoint.offload_to_cpu": WHOLE,
    "checkpoint.rank0_only": WHOLE,
    "checkpoint.preempt_metadata_path": "the newest checkpoint is found in the run folder",
    "logging": LOGS,
    "misc.max_eval_retry": "validation reads the same images every time, and all are finite",
    "misc.num_gpus": "the launcher sets the number of devices (NGPU)",
    "misc.monitors_dynamics": LOGS,
    "misc.data_dump_on": LOGS,
}


def is_stub(entries: Entries) -> bool:
    """Recognizes the stub by `model.hf_config`, or by at least two of its own sections and no
    unknown ones."""
    tops = {path[0] for path in entries}
    if any(path[:2] == HF_CONFIG for path in entries):
        return True
    return len(tops & OWN_SECTIONS) >= 2 and tops <= OWN_SECTIONS | OTHER_SECTIONS


def translate_stub(entries: Entries, shown: str, above: Entries) -> Translated:
    """Returns entries in current keys, notes and problems; `above` will override the entries."""
    draft = Draft({}, shown)
    first = next(iter(entries.values()))
    draft.put(("training", "dataset"), "random", first)
    draft.put(("images", "if_missing"), "random", first)
    draft.put(("model", "name"), "vit_mae", first)
    draft.put(("lr_scheduler", "decay_type"), "cosine", first)
    about = (
        f"{shown}: a config of the training stub, read as a vit_mae with a cosine schedule, on "
        "random tensors if the lists of images do not exist"
    )
    draft.became(Entry(None, shown), about.removeprefix(f"{shown}: "))
    _model(draft, entries, above)
    for path, entry in entries.items():
        _one(draft, path, entry)
    _switches(draft, entries)
    _steps(draft, entries, above)
    _images(draft, entries)
    _channels(draft, entries, above)
    _transforms(draft, entries)
    _last_batch(draft, entries)
    _saves(draft, entries)
    _cpu_only(draft, entries)
    _mixed_precision(draft, entries)
    _accumulation(draft, entries, above)
    _from_scratch(draft, entries, above)
    _folder(draft, entries)
    if ("training", "dataset_path") in draft.entries:
        del draft.entries["training", "dataset"]  # images.if_missing says what replaces the list
    return draft.finish(about)


def _model(draft: Draft, entries: Entries, above: Entries) -> None:
    """Sets the model that `hf_config` changes: transformers' ViTMAEConfig, as in the stub."""
    if ("model", "flavor") in entries or ("model", "config") in {**entries, **above}:
        return
    given = {path[2]: entry for path, entry in entries.items() if is_size(path)}
    source = next(iter([*given.values(), *entries.values()]))
    draft.put(("model", "flavor"), FLAVOR, source)
    if missing := [name for name in SIZES if name not in given]:
        draft.note(
            source,
            f"model.hf_config does not set {any_of(missing, 'and')}; transformers' defaults "
            f'for ViTMAE apply (model.flavor = "{FLAVOR}")',
        )


def is_size(path: KeyPath) -> bool:
    return path[:2] == HF_CONFIG and len(path) > 2


def _one(draft: Draft, path: KeyPath, entry: Entry) -> None:
    dotted = ".".join(path)
    reason = next(
        (why for n in range(len(path), 0, -1) if (why := WITHOUT_MEANING.get(".".join(path[:n])))),
        None,
    )
    if is_size(path):
        draft.put(("model", "overrides", *path[2:]), entry.value, entry)
    elif path == HF_CONFIG:  # nothing below it, or only comments
        if entry.value not in (None, {}):
            draft.refuse(path, entry, "expected keys of a ViTMAEConfig, as in `hidden_size: 1280`")
    elif dotted in SPECIAL:
        SPECIAL[dotted](draft, entry)
    elif path[:3] == TRANSFORM_SET:
        pass  # handled after all keys
    elif dotted in RENAMED:
        if entry.value is None:
            draft.without_meaning(path, entry, UNSET)
        else:
            draft.rename(path, tuple(RENAMED[dotted].split(".")), entry.value, entry)
    elif reason:
        draft.without_meaning(path, entry, reason)
    elif path[0] == "misc":
        draft.refuse(path, entry, "unknown key; remove it")
    else:
        # A current key, or an unknown one, which validation reports.
        draft.put((HOME.get(path[0], path[0]), *path[1:]), entry.value, entry)


def _switches(draft: Draft, entries: Entries) -> None:
    """Refuses values that are neither true nor false, since any text would count as true."""
    for path, entry in entries.items():
        is_transform = path[:3] == TRANSFORM_SET and path[3:] not in [(name,) for name in NORMS]
        if not (".".join(path) in SWITCHES or is_transform) or entry.value is None:
            continue
        if len(path) != 4 and is_transform:
            draft.refuse(path, entry, "expected dataset.transforms.set.NAME: true or false")
        else:
            draft.expect_bool(path, entry)


def _steps(draft: Draft, entries: Entries, above: Entries) -> None:
    """Sets the length of the run; the stub ends after its epochs, however long the schedule is."""
    epochs, steps = ("training", "epochs"), ("training", "steps")
    if steps in above:  # steps on the command line override the file's epochs
        draft.entries.pop(epochs, None)
    entry = entries.get(("lr_scheduler", "total_iterations"))
    if entry is None:
        return
    draft.put(("lr_scheduler", "total_steps"), entry.value, entry)
    if epochs in draft.entries or epochs in above:
        text = "lr_scheduler.total_steps; the run ends after misc.max_epochs"
    else:
        draft.put(steps, entry.value, entry)
        text = "training.steps and lr_scheduler.total_steps"
    draft.became(entry, f"lr_scheduler.total_iterations is now {text}")


def _images(draft: Draft, entries: Entries) -> None:
    sizes = {name: entries.get(("dataset", "input", name)) for name in ("C", "H", "W")}
    given = {name: entry for name, entry in sizes.items() if entry is not None}
    if not given:
        return
    first = next(iter(given.values()))
    if len(given) < len(sizes):
        missing = next(name for name in sizes if name not in given)
        reason = f"dataset.input.{missing} is missing"
        draft.refuse(("dataset", "input"), first, reason)
        return
    draft.put(("images", "shape"), [entry.value for entry in given.values()], first)
    draft.became(first, "dataset.input.C, H and W are now images.shape, for random tensors")


def _channels(draft: Draft, entries: Entries, above: Entries) -> None:
    """Refuses a number of channels that is not the model's."""
    path, taken = ("dataset", "num_channels"), ("model", "overrides", "num_channels")
    entry, settings = entries.get(path), {**draft.entries, **above}
    if entry is None or entry.value is None:
        return
    if taken in settings:
        own, said = settings[taken].value, f"is {settings[taken].value}; make them equal, or"
    elif settings.get(("model", "flavor"), entry).value == FLAVOR:
        own, said = CHANNELS, f"is not set, and {CHANNELS} by default; set it too, or"
    else:
        return
    if own != entry.value:
        draft.refuse(path, entry, f"model.hf_config.num_channels {said} remove this key")


def _transforms(draft: Draft, entries: Entries) -> None:
    """Refuses transforms that are enabled but not supported: without them, training would use other
    images than was asked for."""
    transforms = ("dataset", "transforms")
    for path, entry in entries.items():
        if path[:3] != TRANSFORM_SET or len(path) != 4:
            continue
        name = path[3]
        if name in NORMS:
            draft.rename(path, ("images", "instance_norm"), entry.value, entry)
        elif entry.value in (False, None):
            draft.without_meaning(path, entry, TRANSFORMS)
        elif not isinstance(entry.value, bool):
            pass  # _switches refuses it
        elif name != "pad":
            draft.refuse(path, entry, "this transform is not supported; set it to false")
        else:
            sizes = [entries.get((*transforms, key)) for key in ("H_pad", "W_pad")]
            if None in sizes:
                draft.refuse(
                    path, entry, "set H_pad and W_pad of dataset.transforms to the padded size"
                )
                continue
            draft.put(("images", "pad"), [one.value for one in sizes if one], entry)
            draft.became(entry, "dataset.transforms.set.pad, H_pad and W_pad are now images.pad")


def _last_batch(draft: Draft, entries: Entries) -> None:
    given = [entry for name in DROPS if (entry := entries.get(("dataset", name))) is not None]
    if given:
        how = "drop" if any(entry.value is True for entry in given) else "pad"
        draft.put(("training", "last_batch"), how, given[0])
        draft.became(
            given[0],
            f'dataset.drop_last_in_sampler and drop_last_in_loader are now training.last_batch = "'
            f'{how}", for the whole run: batches continue across segments and epochs',
        )


def _saves(draft: Draft, entries: Entries) -> None:
    """Sets saving and validation; the stub validates when it saves, and keeps the best."""
    saves = entries.get(("checkpoint", "chkpt_saving_iterations"))
    validates = ("validation", "dataset_path") in draft.entries
    every = saves.value if saves is not None else None
    if saves is not None and every is not None:
        draft.put(("checkpoint", "interval"), every, saves)
        draft.became(saves, "checkpoint.chkpt_saving_iterations is now checkpoint.interval")
        if validates:
            draft.put(("validation", "enable"), True, saves)
            draft.put(("validation", "freq"), every, saves)
            draft.put(("checkpoint", "keep_best"), 1, saves)
            draft.became(
                saves,
                "each of these saves also validates on path_eval (validation.freq), and the best "
                "checkpoint is kept (checkpoint.keep_best)",
            )
    elif saves is not None:
        draft.became(
            saves,
            "checkpoint.chkpt_saving_iterations: null saves only after the last step and when "
            "stopped, and does not validate",
        )
        draft.put(("checkpoint", "interval"), NEVER, saves)


def _accumulation(draft: Draft, entries: Entries, above: Entries) -> None:
    """Refuses accumulation, since the batch also depends on the unknown number of devices."""
    path, batch = ("loss", "grad_accum_steps"), ("training", "global_batch_size")
    entry = entries.get(path)
    if entry is None:
        return
    if is_one_of(entry.value, [None, 1]):
        draft.without_meaning(path, entry, "there is no accumulation")
    elif batch in entries or batch in above:
        draft.without_meaning(path, entry, "it follows from training.global_batch_size")
    else:
        size = entries.get(("dataset", "batch_size"))
        local = size.value if size else "local_batch_size"
        draft.refuse(
            path,
            entry,
            "accumulation follows from the global batch size; set training.global_batch_size to "
            f"{local} × {entry.value} × the number of data-parallel devices",
        )


def _from_scratch(draft: Draft, entries: Entries, above: Entries) -> None:
    path = ("model", "from_scratch")
    entry, weights = entries.get(path), ("checkpoint", "initial_load_path")
    if entry is None:
        return
    has_weights = weights in draft.entries or weights in above
    resumes = ("checkpoint", "resume") in draft.entries or ("checkpoint", "resume") in above
    if entry.value is True and has_weights:
        reason = "checkpoint.pretrain sets initial weights; remove it, or set this to false"
        draft.refuse(path, entry, reason)
    elif entry.value is False and not (has_weights or resumes):
        draft.became(
            entry,
            "model.from_scratch is false, but neither checkpoint.pretrain nor path_chkpt_prev is "
            "set; training starts from new weights, as in the stub",
        )
    else:
        reason = "checkpoint.initial_load_path sets the initial weights"
        draft.without_meaning(path, entry, reason)


def _update_interval(draft: Draft, entry: Entry) -> None:
    path = ("lr_scheduler", "scheduler_update_iterations")
    if is_one_of(entry.value, [None, 1]):
        draft.without_meaning(path, entry, "the learning rate is updated at every step")
    else:
        draft.refuse(
            path,
            entry,
            "the learning rate is updated at every step; set this to 1, and count "
            "warmup_iterations and total_iterations in steps",
        )


def _cpu_only(draft: Draft, entries: Entries) -> None:
    """Overrides dist.backend."""
    for path in (("dist", "cpu_only"), ("misc", "cpu_only")):
        entry = entries.get(path)
        if entry is not None and entry.value is True:
            draft.entries[("comm", "backend")] = Entry("gloo", entry.where)
            draft.put(("training", "device"), "cpu", entry)
            text = 'cpu_only is now training.device = "cpu", with comm.backend = "gloo"'
            draft.became(entry, text)
        elif entry is not None:
            draft.without_meaning(path, entry, "GPUs are used if there are any")


def _mixed_precision(draft: Draft, entries: Entries) -> None:
    """Overrides dist.dtype."""
    path = ("misc", "uses_mixed_precision")
    entry = entries.get(path)
    if entry is not None and entry.value is False:
        draft.put(("training", "mixed_precision_param"), "float32", entry)
        draft.became(entry, 'misc.uses_mixed_precision is now mixed_precision_param = "float32"')
    elif entry is not None:
        reason = "training.mixed_precision_param sets the type"
        draft.without_meaning(path, entry, reason)


def _later(draft: Draft, entry: Entry) -> None:
    """Handled after all keys, since it depends on other keys."""


def _folder(draft: Draft, entries: Entries) -> None:
    directory = entries.get(("checkpoint", "directory"))
    prefix = entries.get(("checkpoint", "prefix"))
    parts = [str(part.value) for part in (directory, prefix) if part and part.value]
    source = directory or prefix
    if source and parts:
        folder = str(PurePosixPath(*parts))
        draft.put(("job", "dump_folder"), folder, source)
        draft.put(("checkpoint", "link_by_time"), True, source)
        draft.became(
            source,
            f'checkpoint.directory and prefix are now job.dump_folder = "{folder}"; checkpoints '
            f"are also linked as {folder}.<time>[.preempt] (checkpoint.link_by_time)",
        )


def _state_dict_type(draft: Draft, entry: Entry) -> None:
    """Translates the format; the stub's full checkpoints are four files of `torch.save`."""
    if entry.value == "full":
        draft.put(("checkpoint", "type"), "full", entry)
        draft.put(("checkpoint", "full_format"), "torch", entry)
        text = 'checkpoint.type = "full" with full_format = "torch"'
    elif entry.value not in (None, *STATE_DICTS):
        expected = f"expected {any_of(list(STATE_DICTS))}"
        draft.refuse(("checkpoint", "state_dict_type"), entry, expected)
        return
    else:
        draft.put(("checkpoint", "type"), "shard", entry)
        text = 'checkpoint.type = "shard"'
    draft.became(entry, f"checkpoint.state_dict_type is now {text}")


SPECIAL: dict[str, Callable[[Draft, Entry], None]] = {
    "checkpoint.state_dict_type": _state_dict_type,
    "lr_scheduler.total_iterations": _later,
    "checkpoint.chkpt_saving_iterations": _later,
    "dataset.input.C": _later,
    "dataset.input.H": _later,
    "dataset.input.W": _later,
    "dataset.transforms.H_pad": _later,
    "dataset.transforms.W_pad": _later,
    **dict.fromkeys((f"dataset.{name}" for name in DROPS), _later),
    "checkpoint.directory": _later,
    "checkpoint.prefix": _later,
    "loss.grad_accum_steps": _later,
    "model.from_scratch": _later,
    "lr_scheduler.scheduler_update_iterations": _update_interval,
    "dist.cpu_only": _later,
    "misc.cpu_only": _later,
    "misc.uses_mixed_precision": _later,
}
