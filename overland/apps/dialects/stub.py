"""Translates the YAML of the training stub, a ViT-MAE (`dist`, `dataset`, `model.hf_config`,
`optim`, …): which keys are renamed, ignored or refused.

The stub trains a masked autoencoder. Its dataset paths are lists of images, or placeholders: if
they do not exist, it trains on random tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath

from overland.apps.dialects.draft import Draft, by_key, is_one_of, path_of, reason_for
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
PADS = ("dataset.transforms.H_pad", "dataset.transforms.W_pad")
TRANSFORMS = "these transforms are disabled"
NORMS = (("instance_norm",), ("uses_instance_norm",))
DROPS = ("dataset.drop_last", "dataset.drop_last_in_sampler", "dataset.drop_last_in_loader")
SWITCHES = (
    "dist.cpu_only", "misc.cpu_only", "misc.uses_mixed_precision", "model.from_scratch", *DROPS
)  # fmt: skip
STATE_DICTS = ("full", "sharded", "shard", "local")
NEVER = 1_000_000_000  # steps between saves

# Keys, sections and tables without effect. The longest match counts.
WITHOUT_MEANING = by_key({
    "debug.seed determines all random numbers": "dist.uses_unique_world_seed",
    TRANSFORMS: "dataset.transforms",
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

ABOUT = (
    "a config of the training stub, read as a vit_mae with a cosine schedule, on random tensors if "
    "the lists of images do not exist"
)
FIXED = {
    "training.dataset": "random", "images.if_missing": "random", "model.name": "vit_mae",
    "lr_scheduler.decay_type": "cosine",
}  # fmt: skip

Given = dict[str, Entry]
"""Keys of the file that are translated together."""


def is_stub(entries: Entries) -> bool:
    """Recognizes the stub by `model.hf_config`, or by at least two of its own sections and no
    unknown ones."""
    tops = {path[0] for path in entries}
    if any(path[:2] == HF_CONFIG for path in entries):
        return True
    return len(tops & OWN_SECTIONS) >= 2 and tops <= OWN_SECTIONS | OTHER_SECTIONS


class Stub(Draft):
    """The stub's file while it is translated; `above` will override its entries."""

    def __init__(self, entries: Entries, shown: str, above: Entries) -> None:
        super().__init__({}, shown, above)
        self.given = entries

    def get(self, key: str) -> Entry | None:
        return self.given.get(path_of(key))

    def translate(self) -> Translated:
        first = next(iter(self.given.values()))
        for today, value in FIXED.items():
            self.put(today, value, first)
        self.became(self.first, ABOUT)
        self._model()
        for path, entry in self.given.items():
            self._one(path, entry)
        if path_of("training.steps") in self.above:  # they override the file's epochs
            self.entries.pop(path_of("training.epochs"), None)
        for key, function in LATER.items():
            if (found := self.get(key)) is not None:
                function(self, key, found)
        for translate, keys in TOGETHER.items():
            given = {key: one for key in keys if (one := self.get(key)) is not None}
            if given:
                translate(self, given)
        if path_of("training.dataset_path") in self.entries:
            del self.entries["training", "dataset"]  # images.if_missing says what replaces the list
        return self.finish(f"{self.first.where}: {ABOUT}")

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
        key = ".".join(path)
        reason = reason_for(path, WITHOUT_MEANING)
        if key in SWITCHES and entry.value is not None:
            self.expect_bool(key, entry)
        if is_size(path):
            self.put(("model", "overrides", *path[2:]), entry.value, entry)
        elif path == HF_CONFIG:  # nothing below it, or only comments
            if entry.value not in (None, {}):
                example = "expected keys of a ViTMAEConfig, as in `hidden_size: 1280`"
                self.refuse(key, entry, example)
        elif path[:3] == TRANSFORM_SET:
            self._transform(path[3:], key, entry)
        elif key in TRANSLATED_LATER:
            pass
        elif key in RENAMED and entry.value is None:
            self.without_meaning(key, entry, UNSET)
        elif key in RENAMED:
            self.move(key, RENAMED[key], entry.value, entry)
        elif reason:
            self.without_meaning(key, entry, reason)
        elif path[0] == "misc":
            self.refuse(key, entry, "unknown key; remove it")
        else:
            # A current key, or an unknown one, which validation reports.
            self.put((HOME.get(path[0], path[0]), *path[1:]), entry.value, entry)

    def _transform(self, name: KeyPath, key: str, entry: Entry) -> None:
        """Refuses transforms that are enabled but not supported: without them, training would use
        other images than was asked for."""
        sizes = [self.get(size) for size in PADS]
        if name in NORMS:
            self.move(key, "images.instance_norm", entry.value, entry)
        elif len(name) != 1 and entry.value is not None:
            self.refuse(key, entry, "expected dataset.transforms.set.NAME: true or false")
        elif is_one_of(entry.value, [False, None]):
            self.without_meaning(key, entry, TRANSFORMS)
        elif self.expect_bool(key, entry):
            if name != ("pad",):
                self.refuse(key, entry, "this transform is not supported; set it to false")
            elif None in sizes:
                reason = "set H_pad and W_pad of dataset.transforms to the padded size"
                self.refuse(key, entry, reason)
            else:
                self.put("images.pad", [one.value for one in sizes if one], entry)
                text = "dataset.transforms.set.pad, H_pad and W_pad are now images.pad"
                self.became(entry, text)

    def steps(self, key: str, entry: Entry) -> None:
        """Sets the length of the run; the stub ends after its epochs, however long the schedule
        is."""
        today = {"lr_scheduler.total_steps": entry.value}
        if not self.decided("training.epochs"):
            today["training.steps"] = entry.value
        self.change(key, entry, today)

    def images(self, given: Given) -> None:
        first = next(iter(given.values()))
        for name in "CHW":
            if f"dataset.input.{name}" not in given:
                self.refuse("dataset.input", first, f"dataset.input.{name} is missing")
                return
        self.put("images.shape", [entry.value for entry in given.values()], first)
        text = "dataset.input.C, H and W are now images.shape, for random tensors"
        self.became(first, text)

    def channels(self, key: str, entry: Entry) -> None:
        """Refuses a number of channels that is not the model's."""
        settings = {**self.entries, **self.above}
        taken = settings.get(("model", "overrides", "num_channels"))
        if taken is not None:
            own, said = taken.value, f"is {taken.value}; make them equal, or"
        elif settings.get(("model", "flavor"), entry).value == FLAVOR:
            own, said = CHANNELS, f"is not set, and {CHANNELS} by default; set it too, or"
        else:
            own, said = None, ""
        if own is None or entry.value in (None, own):
            self.without_meaning(key, entry, "model.overrides.num_channels sets it")
        else:
            self.refuse(key, entry, f"model.hf_config.num_channels {said} remove this key")

    def last_batch(self, given: Given) -> None:
        first, *_ = given.values()
        how = "drop" if any(entry.value is True for entry in given.values()) else "pad"
        self.put("training.last_batch", how, first)
        self.became(
            first,
            "dataset.drop_last_in_sampler and drop_last_in_loader are now training.last_batch "
            f'= "{how}", for the whole run: batches continue across segments and epochs',
        )

    def saves(self, key: str, entry: Entry) -> None:
        """Sets saving and validation; the stub validates when it saves, and keeps the best."""
        if entry.value is None:
            text = "null saves only after the last step and when stopped, and does not validate"
            self.became(entry, f"{key}: {text}")
            self.put("checkpoint.interval", NEVER, entry)
            return
        today = {"checkpoint.interval": entry.value}
        if path_of("validation.dataset_path") in self.entries:
            today |= {
                "validation.enable": True, "validation.freq": entry.value,
                "checkpoint.keep_best": 1,
            }  # fmt: skip
        self.change(key, entry, today)

    def accumulation(self, key: str, entry: Entry) -> None:
        """Refuses accumulation, since the batch also depends on the unknown number of devices."""
        size = self.get("dataset.batch_size")
        if is_one_of(entry.value, [None, 1]):
            self.without_meaning(key, entry, "there is no accumulation")
        elif self.decided("training.global_batch_size"):
            self.without_meaning(key, entry, "it follows from training.global_batch_size")
        else:
            local = size.value if size else "local_batch_size"
            self.refuse(
                key,
                entry,
                "accumulation follows from the global batch size; set training.global_batch_size "
                f"to {local} × {entry.value} × the number of data-parallel devices",
            )

    def from_scratch(self, key: str, entry: Entry) -> None:
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

    def device(self, key: str, entry: Entry) -> None:
        cpu = {"comm.backend": "gloo", "training.device": "cpu"}
        today = cpu if entry.value is True else {}
        self.change(key, entry, today, "GPUs are used if there are any")

    def precision(self, key: str, entry: Entry) -> None:
        today = {"training.mixed_precision_param": "float32"} if entry.value is False else {}
        self.change(key, entry, today, "training.mixed_precision_param sets the type")

    def updates(self, key: str, entry: Entry) -> None:
        same = "the learning rate is updated at every step"
        advice = "set this to 1, and count warmup_iterations and total_iterations in steps"
        self.expect(key, entry, [None, 1], f"{same}; {advice}", same)

    def form_of_checkpoints(self, key: str, entry: Entry) -> None:
        """Sets the form of checkpoints, except for the keys of it that the file sets itself."""
        if entry.value not in (None, *STATE_DICTS):
            self.refuse(key, entry, f"expected {any_of(list(STATE_DICTS))}")
            return
        today = {"checkpoint.type": "full" if entry.value == "full" else "shard"}
        own = self.get("checkpoint.type")
        if entry.value == "full" and (own is None or own.value == "full"):
            today["checkpoint.full_format"] = "torch"  # the stub's are four files of `torch.save`
        for one in [one for one in today if self.get(one)]:
            del today[one]
            self.became(entry, f"{key} does not set {one}, since {one} is also set")
        if today:
            self.change(key, entry, today)

    def folder(self, given: Given) -> None:
        parts = [str(entry.value) for entry in given.values() if entry.value]
        if parts:
            source, folder = next(iter(given.values())), str(PurePosixPath(*parts))
            self.put("job.dump_folder", folder, source)
            self.put("checkpoint.link_by_time", True, source)
            self.became(
                source,
                f'checkpoint.directory and prefix are now job.dump_folder = "{folder}"; '
                f"checkpoints are also linked as {folder}.<time>[.preempt] "
                "(checkpoint.link_by_time)",
            )


# Keys that depend on others, and are translated after all of them.
LATER: dict[str, Callable[[Stub, str, Entry], None]] = {
    "lr_scheduler.total_iterations": Stub.steps,
    "lr_scheduler.scheduler_update_iterations": Stub.updates,
    "dataset.num_channels": Stub.channels,
    "checkpoint.chkpt_saving_iterations": Stub.saves,
    "checkpoint.state_dict_type": Stub.form_of_checkpoints,
    "dist.cpu_only": Stub.device,
    "misc.cpu_only": Stub.device,
    "misc.uses_mixed_precision": Stub.precision,
    "loss.grad_accum_steps": Stub.accumulation,
    "model.from_scratch": Stub.from_scratch,
}
# The same for keys that are translated together.
TOGETHER: dict[Callable[[Stub, Given], None], tuple[str, ...]] = {
    Stub.images: ("dataset.input.C", "dataset.input.H", "dataset.input.W"),
    Stub.last_batch: DROPS,
    Stub.folder: ("checkpoint.directory", "checkpoint.prefix"),
}
TRANSLATED_LATER = frozenset({*LATER, *PADS}.union(*TOGETHER.values()))


def is_size(path: KeyPath) -> bool:
    return path[:2] == HF_CONFIG and len(path) > 2
