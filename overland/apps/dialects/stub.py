"""The YAML of the training stub: `dist`, `dataset`, `model.hf_config`, `optim`, … of a ViT-MAE.

The stub trains a masked autoencoder. Its dataset paths are lists of images, or placeholders: if
they do not exist, it trains on random tensors.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from overland.apps.dialects.draft import Draft, by_key, is_one_of, path_of
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
TRANSFORMS = "these transforms are disabled"
NORMS = ("instance_norm", "uses_instance_norm")
DROPS = ("drop_last", "drop_last_in_sampler", "drop_last_in_loader")
SWITCHES = frozenset(
    {"dist.cpu_only", "misc.cpu_only", "misc.uses_mixed_precision", "model.from_scratch"}
    | {f"dataset.{name}" for name in DROPS}
)
STATE_DICTS = ("full", "sharded", "shard", "local")
NEVER = 1_000_000_000  # steps between saves

# Keys, sections and tables without effect. The longest match counts.
WITHOUT_MEANING = by_key({
    "debug.seed determines all random numbers": "dist.uses_unique_world_seed",
    TRANSFORMS: "dataset.transforms",
    "model.overrides.num_channels sets it": "dataset.num_channels",
    "a thread reads ahead (data.read_ahead); there are no loader processes":
        "dataset.cache_size dataset.num_workers dataset.pin_memory dataset.prefetch_factor",
    "checkpoints are sharded and complete, and any number of devices can load them":
        "checkpoint.offload_to_cpu checkpoint.rank0_only",
    "the newest checkpoint is found in the run folder": "checkpoint.preempt_metadata_path",
    "metrics and logs go to the run folder (job.dump_folder)":
        "dataset.debug logging misc.monitors_dynamics misc.data_dump_on",
    "validation reads the same images every time, and all are finite": "misc.max_eval_retry",
    "the launcher sets the number of devices (NGPU)": "misc.num_gpus",
})  # fmt: skip
# Keys that depend on others, and are translated after all of them.
LATER = frozenset({
    "checkpoint.state_dict_type", "lr_scheduler.total_iterations", "dataset.input.C",
    "checkpoint.chkpt_saving_iterations", "dataset.input.H", "dataset.input.W",
    "dataset.transforms.H_pad", "dataset.transforms.W_pad", "checkpoint.directory",
    "checkpoint.prefix", "loss.grad_accum_steps", "model.from_scratch",
    "lr_scheduler.scheduler_update_iterations", "dist.cpu_only", "misc.cpu_only",
    "misc.uses_mixed_precision", *(f"dataset.{name}" for name in DROPS),
})  # fmt: skip


def is_stub(entries: Entries) -> bool:
    """Recognizes the stub by `model.hf_config`, or by at least two of its own sections and no
    unknown ones."""
    tops = {path[0] for path in entries}
    if any(path[:2] == HF_CONFIG for path in entries):
        return True
    return len(tops & OWN_SECTIONS) >= 2 and tops <= OWN_SECTIONS | OTHER_SECTIONS


def translate_stub(entries: Entries, shown: str, above: Entries) -> Translated:
    """Returns entries in current keys, notes and problems; `above` will override the entries."""
    return Stub(entries, shown, above).translate()


class Stub(Draft):
    """The stub's file while it is translated."""

    def __init__(self, entries: Entries, shown: str, above: Entries) -> None:
        super().__init__({}, shown, above)
        self.given = entries

    def get(self, key: str) -> Entry | None:
        return self.given.get(path_of(key))

    def translate(self) -> Translated:
        first = next(iter(self.given.values()))
        fixed = {
            "training.dataset": "random", "images.if_missing": "random", "model.name": "vit_mae",
            "lr_scheduler.decay_type": "cosine",
        }  # fmt: skip
        self.put_all(fixed, first)
        about = (
            "a config of the training stub, read as a vit_mae with a cosine schedule, on random "
            "tensors if the lists of images do not exist"
        )
        self.became(self.first, about)
        self._model()
        for path, entry in self.given.items():
            self._one(path, entry)
        self._switches()
        self._steps()
        self._images()
        self._channels()
        self._transforms()
        self._last_batch()
        self._saves()
        self._numbers()
        self._accumulation()
        self._from_scratch()
        self._folder()
        if path_of("training.dataset_path") in self.entries:
            del self.entries["training", "dataset"]  # images.if_missing says what replaces the list
        return self.finish(f"{self.first.where}: {about}")

    def _model(self) -> None:
        """Sets the model that `hf_config` changes: transformers' ViTMAEConfig, as in the stub."""
        config = ("model", "config")
        if self.get("model.flavor") or config in self.given or config in self.above:
            return
        given = {path[2]: entry for path, entry in self.given.items() if is_size(path)}
        source = next(iter([*given.values(), *self.given.values()]))
        self.put("model.flavor", FLAVOR, source)
        if missing := [name for name in SIZES if name not in given]:
            self.note(
                source,
                f"model.hf_config does not set {any_of(missing, 'and')}; transformers' defaults "
                f'for ViTMAE apply (model.flavor = "{FLAVOR}")',
            )

    def _one(self, path: KeyPath, entry: Entry) -> None:
        dotted = ".".join(path)
        tables = (".".join(path[:n]) for n in range(len(path), 0, -1))
        reason = next((WITHOUT_MEANING[name] for name in tables if name in WITHOUT_MEANING), None)
        if is_size(path):
            self.put(("model", "overrides", *path[2:]), entry.value, entry)
        elif path == HF_CONFIG:  # nothing below it, or only comments
            if entry.value not in (None, {}):
                example = "expected keys of a ViTMAEConfig, as in `hidden_size: 1280`"
                self.refuse(dotted, entry, example)
        elif dotted in LATER or path[:3] == TRANSFORM_SET:
            pass
        elif dotted in RENAMED and entry.value is None:
            self.without_meaning(dotted, entry, UNSET)
        elif dotted in RENAMED:
            self.move(dotted, RENAMED[dotted], entry.value, entry)
        elif reason:
            self.without_meaning(dotted, entry, reason)
        elif path[0] == "misc":
            self.refuse(dotted, entry, "unknown key; remove it")
        else:
            # A current key, or an unknown one, which validation reports.
            self.put((HOME.get(path[0], path[0]), *path[1:]), entry.value, entry)

    def _switches(self) -> None:
        """Refuses values that are neither true nor false, since any text would count as true."""
        for path, entry in self.given.items():
            dotted = ".".join(path)
            is_transform = path[:3] == TRANSFORM_SET and path[3:] not in [(one,) for one in NORMS]
            if not (dotted in SWITCHES or is_transform) or entry.value is None:
                continue
            if len(path) != 4 and is_transform:
                reason = "expected dataset.transforms.set.NAME: true or false"
                self.refuse(dotted, entry, reason)
            else:
                self.expect_bool(dotted, entry)

    def _steps(self) -> None:
        """Sets the length of the run; the stub ends after its epochs, however long the schedule
        is."""
        epochs, steps = path_of("training.epochs"), path_of("training.steps")
        if steps in self.above:  # steps on the command line override the file's epochs
            self.entries.pop(epochs, None)
        entry = self.get("lr_scheduler.total_iterations")
        if entry is None:
            return
        self.put("lr_scheduler.total_steps", entry.value, entry)
        if epochs in self.entries or epochs in self.above:
            text = "lr_scheduler.total_steps; the run ends after misc.max_epochs"
        else:
            self.put(steps, entry.value, entry)
            text = "training.steps and lr_scheduler.total_steps"
        self.became(entry, f"lr_scheduler.total_iterations is now {text}")

    def _images(self) -> None:
        sizes = {name: self.get(f"dataset.input.{name}") for name in ("C", "H", "W")}
        given = [entry for entry in sizes.values() if entry is not None]
        missing = [name for name, entry in sizes.items() if entry is None]
        if given and missing:
            reason = f"dataset.input.{missing[0]} is missing"
            self.refuse("dataset.input", given[0], reason)
        elif given:
            self.put("images.shape", [entry.value for entry in given], given[0])
            text = "dataset.input.C, H and W are now images.shape, for random tensors"
            self.became(given[0], text)

    def _channels(self) -> None:
        """Refuses a number of channels that is not the model's."""
        entry, settings = self.get("dataset.num_channels"), {**self.entries, **self.above}
        if entry is None or entry.value is None:
            return
        taken = settings.get(("model", "overrides", "num_channels"))
        if taken is not None:
            own, said = taken.value, f"is {taken.value}; make them equal, or"
        elif settings.get(("model", "flavor"), entry).value == FLAVOR:
            own, said = CHANNELS, f"is not set, and {CHANNELS} by default; set it too, or"
        else:
            return
        if own != entry.value:
            reason = f"model.hf_config.num_channels {said} remove this key"
            self.refuse("dataset.num_channels", entry, reason)

    def _transforms(self) -> None:
        """Refuses transforms that are enabled but not supported: without them, training would use
        other images than was asked for."""
        for path, entry in self.given.items():
            if path[:3] != TRANSFORM_SET or len(path) != 4:
                continue
            name, dotted = path[3], ".".join(path)
            sizes = [self.get(f"dataset.transforms.{key}") for key in ("H_pad", "W_pad")]
            if name in NORMS:
                self.move(dotted, "images.instance_norm", entry.value, entry)
            elif entry.value in (False, None):
                self.without_meaning(dotted, entry, TRANSFORMS)
            elif not isinstance(entry.value, bool):
                pass  # _switches refuses it
            elif name != "pad":
                self.refuse(dotted, entry, "this transform is not supported; set it to false")
            elif None in sizes:
                reason = "set H_pad and W_pad of dataset.transforms to the padded size"
                self.refuse(dotted, entry, reason)
            else:
                self.put("images.pad", [one.value for one in sizes if one], entry)
                text = "dataset.transforms.set.pad, H_pad and W_pad are now images.pad"
                self.became(entry, text)

    def _last_batch(self) -> None:
        given = [entry for name in DROPS if (entry := self.get(f"dataset.{name}")) is not None]
        if given:
            how = "drop" if any(entry.value is True for entry in given) else "pad"
            self.put("training.last_batch", how, given[0])
            self.became(
                given[0],
                "dataset.drop_last_in_sampler and drop_last_in_loader are now training.last_batch "
                f'= "{how}", for the whole run: batches continue across segments and epochs',
            )

    def _saves(self) -> None:
        """Sets saving and validation; the stub validates when it saves, and keeps the best."""
        saves = self.get("checkpoint.chkpt_saving_iterations")
        if saves is None:
            return
        if saves.value is None:
            self.became(
                saves,
                "checkpoint.chkpt_saving_iterations: null saves only after the last step and when "
                "stopped, and does not validate",
            )
            self.put("checkpoint.interval", NEVER, saves)
            return
        self.put("checkpoint.interval", saves.value, saves)
        self.became(saves, "checkpoint.chkpt_saving_iterations is now checkpoint.interval")
        if path_of("validation.dataset_path") in self.entries:
            validated = {
                "validation.enable": True, "validation.freq": saves.value,
                "checkpoint.keep_best": 1,
            }  # fmt: skip
            self.put_all(validated, saves)
            self.became(
                saves,
                "each of these saves also validates on path_eval (validation.freq), and the best "
                "checkpoint is kept (checkpoint.keep_best)",
            )

    def _accumulation(self) -> None:
        """Refuses accumulation, since the batch also depends on the unknown number of devices."""
        key, batch = "loss.grad_accum_steps", path_of("training.global_batch_size")
        entry, size = self.get(key), self.get("dataset.batch_size")
        if entry is None:
            return
        if is_one_of(entry.value, [None, 1]):
            self.without_meaning(key, entry, "there is no accumulation")
        elif batch in self.given or batch in self.above:
            self.without_meaning(key, entry, "it follows from training.global_batch_size")
        else:
            local = size.value if size else "local_batch_size"
            self.refuse(
                key,
                entry,
                "accumulation follows from the global batch size; set training.global_batch_size "
                f"to {local} × {entry.value} × the number of data-parallel devices",
            )

    def _from_scratch(self) -> None:
        key = "model.from_scratch"
        entry = self.get(key)
        if entry is None:
            return
        has_weights = self.decided("checkpoint.initial_load_path")
        if entry.value is True and has_weights:
            reason = "checkpoint.pretrain sets initial weights; remove it, or set this to false"
            self.refuse(key, entry, reason)
        elif entry.value is False and not (has_weights or self.decided("checkpoint.resume")):
            self.became(
                entry,
                "model.from_scratch is false, but neither checkpoint.pretrain nor path_chkpt_prev "
                "is set; training starts from new weights, as in the stub",
            )
        else:
            reason = "checkpoint.initial_load_path sets the initial weights"
            self.without_meaning(key, entry, reason)

    def _numbers(self) -> None:
        """Translates device and precision, which override dist.backend and dist.dtype, the form of
        checkpoints and the unit of the schedule."""
        for key in ("dist.cpu_only", "misc.cpu_only"):
            entry = self.get(key)
            if entry is not None and entry.value is True:
                self.put_all({"comm.backend": "gloo", "training.device": "cpu"}, entry)
                text = 'cpu_only is now training.device = "cpu", with comm.backend = "gloo"'
                self.became(entry, text)
            else:
                self.without_meaning(key, entry, "GPUs are used if there are any")
        key = "misc.uses_mixed_precision"
        entry = self.get(key)
        if entry is not None and entry.value is False:
            self.put("training.mixed_precision_param", "float32", entry)
            self.became(entry, f'{key} is now mixed_precision_param = "float32"')
        else:
            self.without_meaning(key, entry, "training.mixed_precision_param sets the type")
        key = "lr_scheduler.scheduler_update_iterations"
        if (entry := self.get(key)) is not None:
            same = "the learning rate is updated at every step"
            advice = "set this to 1, and count warmup_iterations and total_iterations in steps"
            self.expect(key, entry, [None, 1], f"{same}; {advice}", same)
        key = "checkpoint.state_dict_type"
        if (entry := self.get(key)) is not None:
            if entry.value == "full":  # the stub's are four files of `torch.save`
                own = self.get("checkpoint.type")
                is_full = own is None or own.value == "full"  # only these have formats
                files = {"checkpoint.full_format": "torch"} if is_full else {}
                self._form_of_checkpoints({"checkpoint.type": "full", **files}, entry)
            elif entry.value in (None, *STATE_DICTS):
                self._form_of_checkpoints({"checkpoint.type": "shard"}, entry)
            else:
                self.refuse(key, entry, f"expected {any_of(list(STATE_DICTS))}")

    def _form_of_checkpoints(self, values: dict[str, str], source: Entry) -> None:
        """Sets keys from `checkpoint.state_dict_type`, but none that the file sets itself."""
        key, own = "checkpoint.state_dict_type", [one for one in values if self.get(one)]
        for one in own:
            self.became(source, f"{key} does not set {one}, since {one} is also set")
        rest = {today: value for today, value in values.items() if today not in own}
        if rest:
            self.put_all(rest, source)
            text = " with ".join(f'{today} = "{value}"' for today, value in rest.items())
            self.became(source, f"{key} is now {text}")

    def _folder(self) -> None:
        directory, prefix = self.get("checkpoint.directory"), self.get("checkpoint.prefix")
        parts = [str(part.value) for part in (directory, prefix) if part and part.value]
        source = directory or prefix
        if source and parts:
            folder = str(PurePosixPath(*parts))
            self.put_all({"job.dump_folder": folder, "checkpoint.link_by_time": True}, source)
            self.became(
                source,
                f'checkpoint.directory and prefix are now job.dump_folder = "{folder}"; '
                f"checkpoints are also linked as {folder}.<time>[.preempt] "
                "(checkpoint.link_by_time)",
            )


def is_size(path: KeyPath) -> bool:
    return path[:2] == HF_CONFIG and len(path) > 2
