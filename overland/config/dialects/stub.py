"""The YAML of the training stub: `dist`, `dataset`, `model.hf_config`, `optim`, … of a ViT-MAE.

The stub trains a masked autoencoder on random tensors; its dataset paths are placeholders.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath

from overland.config.dialects import Draft, Translated
from overland.config.source import Entries, Entry, KeyPath

OWN_SECTIONS = frozenset({"dist", "dataset", "optim", "loss", "misc", "logging"})
OTHER_SECTIONS = frozenset({"model", "lr_scheduler", "checkpoint"})

HOME = {"dist": "comm", "optim": "optimizer", "loss": "training"}

RENAMED: dict[str, str] = {
    "dist.backend": "comm.backend",
    "dist.dtype": "training.mixed_precision_param",
    "dist.sharding_stage": "parallelism.sharding_stage",
    "misc.sharding_stage": "parallelism.sharding_stage",
    "misc.compiles_model": "compile.enable",
    "dataset.batch_size": "training.local_batch_size",
    "optim.lr": "optimizer.lr",
    "optim.weight_decay": "optimizer.weight_decay",
    "optim.beta1": "optimizer.beta1",
    "optim.beta2": "optimizer.beta2",
    "optim.grad_clip": "training.max_norm",
    "lr_scheduler.warmup_iterations": "lr_scheduler.warmup_steps",
    "lr_scheduler.min_lr": "lr_scheduler.min_lr",
    "checkpoint.path_chkpt_prev": "checkpoint.resume",
    "checkpoint.pretrain": "checkpoint.initial_load_path",
}

RANDOM = "the stub trains on random tensors, so there is nothing to read or transform"
EPOCHS = "random tensors have no end, so there are no epochs: the run ends after training.steps"
LOADER = "a thread reads ahead (data.read_ahead); there are no loader processes"
WHOLE = "checkpoints are sharded and whole, and can be read on any number of devices"
UNSET = "null sets nothing"
LOGS = "metrics and logs go to the run folder (job.dump_folder)"

# Key, or a section or table -> why it means nothing here. The longest match counts.
WITHOUT_MEANING: dict[str, str] = {
    "dist.uses_unique_world_seed": "every random stream follows from debug.seed",
    "dataset": RANDOM,
    "dataset.num_workers": LOADER,
    "dataset.pin_memory": LOADER,
    "dataset.prefetch_factor": LOADER,
    "dataset.seg_size": EPOCHS,
    "checkpoint.offload_to_cpu": WHOLE,
    "checkpoint.rank0_only": WHOLE,
    "checkpoint.preempt_metadata_path": "the newest checkpoint is found in the run folder",
    "logging": LOGS,
    "misc.max_epochs": EPOCHS,
    "misc.max_eval_iter": "set validation.enable and validation.steps to validate",
    "misc.max_eval_retry": "set validation.enable and validation.steps to validate",
    "misc.num_gpus": "the launcher counts devices (NGPU)",
    "misc.peak_flops_per_sec": "peak rates of known devices are built in",
    "misc.monitors_dynamics": LOGS,
    "misc.data_dump_on": LOGS,
}


def is_stub(entries: Entries) -> bool:
    """Recognises the stub by `model.hf_config`, or by two of its own sections and none of another
    kind."""
    tops = {path[0] for path in entries}
    if any(path[:2] == ("model", "hf_config") for path in entries):
        return True
    return len(tops & OWN_SECTIONS) >= 2 and tops <= OWN_SECTIONS | OTHER_SECTIONS


def translate_stub(entries: Entries, shown: str, above: Entries) -> Translated:
    """Entries in today's keys, notes, and what is refused; `above` will be laid over them."""
    draft = Draft({}, shown)
    first = next(iter(entries.values()))
    draft.put(("training", "dataset"), "random", entries.get(("dataset", "path_train"), first))
    draft.put(("model", "name"), "vit_mae", first)
    draft.put(("lr_scheduler", "decay_type"), "cosine", first)
    draft.notes.append(
        f"{shown}: a config of the training stub, read as a vit_mae on random tensors with a "
        "cosine schedule"
    )
    for path, entry in entries.items():
        _one(draft, path, entry)
    _cpu_only(draft, entries)
    _mixed_precision(draft, entries)
    _accumulation(draft, entries, above)
    _from_scratch(draft, entries, above)
    _folder(draft, entries)
    return draft.finish()


def _one(draft: Draft, path: KeyPath, entry: Entry) -> None:
    dotted = ".".join(path)
    reason = next(
        (why for n in range(len(path), 0, -1) if (why := WITHOUT_MEANING.get(".".join(path[:n])))),
        None,
    )
    if path[:2] == ("model", "hf_config"):
        draft.put(("model", "overrides", *path[2:]), entry.value, entry)
    elif dotted in SPECIAL:
        SPECIAL[dotted](draft, entry)
    elif dotted in RENAMED:
        if entry.value is None:
            draft.without_meaning(path, entry, UNSET)
        else:
            draft.rename(path, tuple(RENAMED[dotted].split(".")), entry.value, entry)
    elif reason:
        draft.without_meaning(path, entry, reason)
    elif path[0] == "misc":
        draft.refuse(path, entry, "nothing is known here of this key; remove it")
    else:
        # Today's key, or an unknown one, which validation reports in the section it belongs to.
        draft.put((HOME.get(path[0], path[0]), *path[1:]), entry.value, entry)


def _steps(draft: Draft, entry: Entry) -> None:
    draft.put(("training", "steps"), entry.value, entry)
    draft.put(("lr_scheduler", "total_steps"), entry.value, entry)
    draft.note(
        entry,
        "lr_scheduler.total_iterations is now training.steps and lr_scheduler.total_steps (the "
        "stub may stop earlier, after misc.max_epochs)",
    )


def _interval(draft: Draft, entry: Entry) -> None:
    if entry.value is None:
        draft.note(entry, "checkpoint.chkpt_saving_iterations: null saves nothing by itself")
        draft.entries.setdefault(("checkpoint", "enable"), Entry(False, entry.where))
    else:
        _save_every(draft, entry, "chkpt_saving_iterations")


def _preempt_interval(draft: Draft, entry: Entry) -> None:
    if entry.value is None:
        path = ("checkpoint", "preempt_chkpt_saving_iterations")
        draft.without_meaning(path, entry, UNSET)
    else:
        _save_every(draft, entry, "preempt_chkpt_saving_iterations")


def _save_every(draft: Draft, entry: Entry, name: str) -> None:
    """The stub saves on two clocks; one clock with the shorter interval does for both."""
    key = ("checkpoint", "interval")
    other = draft.entries.get(key)
    numbers = other is not None and type(entry.value) is type(other.value) is int
    if other is None or (numbers and entry.value < other.value):
        draft.entries[key] = entry
    draft.entries[("checkpoint", "enable")] = Entry(True, entry.where)
    draft.note(entry, f"checkpoint.{name} is now checkpoint.interval (the shorter of the two)")


def _accumulation(draft: Draft, entries: Entries, above: Entries) -> None:
    """The batch depends on it, and on the number of devices, which is not known here."""
    path, batch = ("loss", "grad_accum_steps"), ("training", "global_batch_size")
    entry = entries.get(path)
    if entry is None:
        return
    if entry.value in (None, 1):
        draft.without_meaning(path, entry, "one step is one batch")
    elif batch in entries or batch in above:
        draft.without_meaning(path, entry, "it follows from training.global_batch_size")
    else:
        size = entries.get(("dataset", "batch_size"))
        local = size.value if size else "local_batch_size"
        draft.refuse(
            path,
            entry,
            "accumulation follows from the global batch; set training.global_batch_size to "
            f"{local} × {entry.value} × the number of data-parallel devices",
        )


def _from_scratch(draft: Draft, entries: Entries, above: Entries) -> None:
    path = ("model", "from_scratch")
    entry, weights = entries.get(path), ("checkpoint", "initial_load_path")
    if entry is None:
        return
    if entry.value is not False or weights in draft.entries or weights in above:
        reason = "checkpoint.initial_load_path says what weights to start from"
        draft.without_meaning(path, entry, reason)
    else:
        reason = "no weights are given to start from; set checkpoint.initial_load_path"
        draft.refuse(path, entry, reason)


def _update_interval(draft: Draft, entry: Entry) -> None:
    path = ("lr_scheduler", "scheduler_update_iterations")
    if entry.value in (None, 1):
        draft.without_meaning(path, entry, "the rate is updated at every step")
    else:
        draft.refuse(
            path,
            entry,
            "the rate is updated at every step; set it to 1, and count warmup_iterations and "
            "total_iterations in steps",
        )


def _cpu_only(draft: Draft, entries: Entries) -> None:
    """Stands above dist.backend."""
    for path in (("dist", "cpu_only"), ("misc", "cpu_only")):
        entry = entries.get(path)
        if entry is not None and entry.value is True:
            draft.entries[("comm", "backend")] = Entry("gloo", entry.where)
            draft.note(
                entry,
                'cpu_only is now comm.backend = "gloo"; on a machine with GPUs, also hide them: '
                "CUDA_VISIBLE_DEVICES=''",
            )
        elif entry is not None:
            draft.without_meaning(path, entry, "GPUs are used where there are any")


def _mixed_precision(draft: Draft, entries: Entries) -> None:
    """Stands above dist.dtype."""
    path = ("misc", "uses_mixed_precision")
    entry = entries.get(path)
    if entry is not None and entry.value is False:
        draft.put(("training", "mixed_precision_param"), "float32", entry)
        draft.note(entry, 'misc.uses_mixed_precision is now mixed_precision_param = "float32"')
    elif entry is not None:
        reason = "training.mixed_precision_param says in which type"
        draft.without_meaning(path, entry, reason)


def _later(draft: Draft, entry: Entry) -> None:
    """Needs other keys too, and is done after all of them."""


def _folder(draft: Draft, entries: Entries) -> None:
    directory = entries.get(("checkpoint", "directory"))
    prefix = entries.get(("checkpoint", "prefix"))
    parts = [str(part.value) for part in (directory, prefix) if part and part.value]
    source = directory or prefix
    if source and parts:
        folder = str(PurePosixPath(*parts))
        draft.put(("job", "dump_folder"), folder, source)
        draft.note(source, f'checkpoint.directory and prefix are now job.dump_folder = "{folder}"')


def _state_dict_type(draft: Draft, entry: Entry) -> None:
    """The stub's whole checkpoints are four files of `torch.save`."""
    if entry.value == "full":
        draft.put(("checkpoint", "type"), "full", entry)
        draft.put(("checkpoint", "full_format"), "torch", entry)
        text = 'checkpoint.type = "full" with full_format = "torch"'
    else:
        draft.put(("checkpoint", "type"), "shard", entry)
        text = 'checkpoint.type = "shard"'
    draft.note(entry, f"checkpoint.state_dict_type is now {text}")


SPECIAL: dict[str, Callable[[Draft, Entry], None]] = {
    "checkpoint.state_dict_type": _state_dict_type,
    "lr_scheduler.total_iterations": _steps,
    "checkpoint.chkpt_saving_iterations": _interval,
    "checkpoint.preempt_chkpt_saving_iterations": _preempt_interval,
    "checkpoint.directory": _later,
    "checkpoint.prefix": _later,
    "loss.grad_accum_steps": _later,
    "model.from_scratch": _later,
    "lr_scheduler.scheduler_update_iterations": _update_interval,
    "dist.cpu_only": _later,
    "misc.cpu_only": _later,
    "misc.uses_mixed_precision": _later,
}
