"""Translates the keys of axolotl's YAML that depend on others (model, adapters, batch, optimizer,
schedule, saving), sets axolotl's defaults, and reports unknown keys.

If a file leaves out a key that affects training, axolotl's default applies, not ours. Simple keys
are in `axolotl_keys`, those about data in `axolotl_data`.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from overland.apps.dialects.axolotl_data import translate_data
from overland.apps.dialects.axolotl_file import File, folder_of, listed
from overland.apps.dialects.axolotl_keys import (
    IGNORED,
    KERNELS,
    LORA,
    PREFERENCE,
    REFUSED,
    RENAMED,
    SHARDING,
    WANDB,
    WITH_OTHERS,
)
from overland.apps.dialects.draft import is_on, is_one_of
from overland.config.errors import Problem
from overland.config.source import Entries, Entry, Translated
from overland.words import nearest_name

UNKNOWN = "unknown key, which may change what is trained; remove it"
SOME = frozenset(
    {"datasets", "sequence_len", "micro_batch_size", "gradient_accumulation_steps", "num_epochs",
     "learning_rate", "adapter", "lora_r", "sample_packing", "val_set_size", "output_dir", "rl"}
)  # fmt: skip
SCHEDULES = ("cosine", "cosine_with_min_lr", "linear", "constant", "constant_with_warmup")
# Optimizers that are equivalent to AdamW.
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw",
         "optimi_adamw")  # fmt: skip
NARROW_ADAMW = (
    "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "paged_adamw",
    "adamw_torch_8bit", "adamw_torch_4bit", "ao_adamw_8bit", "ao_adamw_4bit", "ao_adamw_fp8",
    "flash_adamw",
)  # fmt: skip
LION = ("lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit", "lion_pytorch")
# Plugins that only provide other implementations, and the prefixes of their keys.
PLUGINS = ("liger", "cut_cross_entropy")
PLUGIN_KEYS = ("liger_",)
# axolotl's defaults, by current key.
DEFAULTS: dict[str, Any] = {
    "training.local_batch_size": 1,
    "training.max_norm": 1.0,
    "optimizer.weight_decay": 0.0,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.999,
    "optimizer.eps": 1e-8,
    "debug.seed": 42,
}


def is_axolotl(entries: Entries) -> bool:
    """Recognizes a file by `base_model` and one other top-level key, or by three others."""
    tops = {path[0] for path in entries}
    return ("base_model" in tops and bool(tops & SOME)) or len(tops & SOME) >= 3


def translate_axolotl(entries: Entries, shown: str, above: Entries) -> Translated:
    """Returns entries in current keys, notes and problems; `above` will override the entries."""
    file = File(entries, shown, above)
    _model(file)
    translate_data(file)
    _lora(file)
    _preference(file)
    _batch(file)
    _optimizer(file)
    _schedule(file)
    _numbers(file)
    _saving(file)
    _devices(file)
    for key, today in RENAMED.items():
        file.rename(key, today)
    _rest(file)
    return file.finish()


def _model(file: File) -> None:
    entry = file.take("base_model")
    if entry is None:
        if not file.decided("model.from") and not file.decided("model.config"):
            file.lacks("base_model", None, "is missing; name the model to fine-tune")
    else:
        folder = folder_of(file, entry, "model")
        if file.value("reinit_weights"):
            file.put("model.config", folder, entry, "base_model")
            file.put("model.hf_assets_path", folder, entry)
        else:
            file.put("model.from", folder, entry, "base_model")
    tokenizer = file.take("tokenizer_config")
    if tokenizer is not None:
        folder = folder_of(file, tokenizer, "tokenizer")
        file.put("model.hf_assets_path", folder, tokenizer, "tokenizer_config")
    config = file.take("base_model_config")
    if config is not None and (entry is None or config.value != entry.value):
        reason = "the architecture is that of base_model; set model.overrides for what differs"
        file.refuse("base_model_config", config, reason)
    for key in ("overrides_of_model_config", "model_config"):
        file.rename(key, "model.overrides")


def _lora(file: File) -> None:
    adapter, narrow = file.take("adapter"), file.take("load_in_4bit")
    if adapter is None:
        if is_on(narrow):
            file.lacks("load_in_4bit", narrow, "4-bit frozen weights need an adapter")
        for key in [key for key in file.keys if key in LORA or key.startswith("lora_target_")]:
            file.ignore(key, "without adapter, all weights are trained")
        return
    if adapter.value not in ("lora", "qlora"):
        file.refuse("adapter", adapter, "expected lora or qlora")
    if is_on(narrow):
        file.put("lora.base", "nf4", narrow, "load_in_4bit")
    elif adapter.value == "qlora":
        file.lacks("adapter", adapter, "qlora needs load_in_4bit: true")
    for key in ("lora_r", "lora_alpha") if "lora_model_dir" not in file.keys else ():
        if key not in file.keys and not file.decided(LORA[key]):
            file.lacks(key, None, "is missing; an adapter needs it")
    file.renamed.append("adapter → lora.rank")
    _targets(file)
    for key, today in LORA.items():
        file.rename(key, today)
    file.default("lora.save_as_peft", True)


def _targets(file: File) -> None:
    """Translates the targets: names, all matrices of the blocks, or all of these plus names."""
    names, all_linear = file.take("lora_target_modules"), file.take("lora_target_linear")
    if is_on(all_linear):
        others = [
            str(name) for name in listed(names.value if names else None)
            if not str(name).endswith("_proj") and name != "all-linear"
        ]  # fmt: skip
        if others:
            advice = f"list all targets, including {', '.join(others)}"
            reason = f"does not combine with lora_target_linear; {advice}"
            file.refuse("lora_target_modules", names, reason)
        file.put("lora.targets", "all-linear", all_linear, "lora_target_linear")
    elif names is not None:
        file.put("lora.targets", names.value, names, "lora_target_modules")


def _preference(file: File) -> None:
    entry = file.take("rl")
    if entry is None:
        for key in [key for key in (*PREFERENCE, "orpo_alpha", "cpo_alpha") if key in file.keys]:
            file.ignore(key, "without rl, there is no preference tuning")
        return
    loss, asked = entry.value, file.take("dpo_loss_type")
    if asked is not None:
        kinds = {"sigmoid": "dpo", "ipo": "ipo"}
        wanted = listed(asked.value)
        if len(wanted) == 1 and str(wanted[0]) in kinds and loss in ("dpo", "ipo"):
            loss = kinds[wanted[0]]
        else:
            file.refuse("dpo_loss_type", asked, "expected sigmoid or ipo")
    if loss not in ("dpo", "ipo", "orpo", "simpo"):
        file.refuse("rl", entry, "expected dpo, ipo, orpo or simpo")
        return
    file.put("preference.loss", loss, entry, "rl")
    for key, today in PREFERENCE.items():
        file.rename(key, today)
    if loss == "orpo":
        file.rename("orpo_alpha", "preference.beta")
    else:
        file.ignore("orpo_alpha", "it is for orpo")
    alpha = file.take("cpo_alpha")
    if loss == "simpo" and (alpha is None or alpha.value != 0):
        reason = "must be 0 for simpo; it also learns the chosen answers, which is not supported"
        file.refuse("cpo_alpha", alpha, f"{reason} (axolotl's default is 1)")
    file.switch("precompute_ref_log_probs", {"preference.reference": "precomputed"})


def _batch(file: File) -> None:
    """Translates the batch size, which in axolotl depends on the number of devices."""
    size, whole = file.take("micro_batch_size"), file.take("batch_size")
    passes = file.take("gradient_accumulation_steps")
    if whole is not None and type(whole.value) is not int:
        file.refuse("batch_size", whole, "expected a whole number")
    rows = 1 if size is None else size.value
    if size is not None:
        file.put("training.local_batch_size", rows, size, "micro_batch_size")
    if whole is not None and passes is None and type(whole.value) is type(rows) is int and rows:
        passes = Entry(max(1, whole.value // rows), whole.where)  # as axolotl does
    number = 1 if passes is None else passes.value
    sizes = (file.keys.get(key) for key in ("dp_shard_size", "dp_replicate_size"))
    known = [entry.value for entry in sizes if entry is not None]
    if passes is None or is_one_of(number, [1]) or file.decided("training.global_batch_size"):
        reason = "it follows from training.global_batch_size"
        file.without_meaning("gradient_accumulation_steps", passes, reason)
        return
    if not (type(number) is int and number > 0):
        file.refuse("gradient_accumulation_steps", passes, "expected a positive whole number")
        return
    if not all(type(one) is int for one in (rows, *known)) or rows < 1:
        return  # validation refuses these
    if any(one < 1 for one in known):
        reason = "needs the number of devices; set training.global_batch_size instead"
        file.refuse("gradient_accumulation_steps", passes, reason)
        return
    devices = prod(known)
    batch = rows * number * devices
    file.put("training.global_batch_size", batch, passes)
    count = "one device" if devices == 1 else f"{devices} devices"
    file.note(
        passes,
        f"gradient_accumulation_steps is now training.global_batch_size = {batch} ({rows} × "
        f"{number} × {count}); axolotl's batch grows with the number of devices, this one does "
        "not: multiply it by the number of data-parallel devices",
    )


def _optimizer(file: File) -> None:
    entry = file.take("optimizer")
    if entry is None:
        return
    name, betas = entry.value, {"adam_beta1": 0.9, "adam_beta2": 0.999}
    if name in LION:
        options = {key[5:]: file.value(key, value) for key, value in betas.items()}
        file.put("optimizer.name", "Lion", entry, "optimizer")
        file.put("optimizer.options", options, entry)
        file.ignore("adam_epsilon", "Lion has none")
        file.default("optimizer.weight_decay", file.value("weight_decay", 0.0))
        return
    if name in NARROW_ADAMW:
        file.note(
            entry,
            f'optimizer = "{name}" is now AdamW with full-precision moments, not paged; '
            "optimizer.bf16_moments = true halves their size",
        )
    elif name not in ADAMW:
        near = nearest_name(str(name), (*ADAMW, *NARROW_ADAMW, *LION))
        hint = f"; did you mean {near}?" if near else ""
        file.refuse("optimizer", entry, f"only AdamW and Lion are supported{hint}")
    file.put("optimizer.name", "AdamW", entry, "optimizer")


def _schedule(file: File) -> None:
    steps, epochs = file.take("max_steps"), file.take("num_epochs")
    if steps is not None and steps.value != -1:
        file.put("training.steps", steps.value, steps, "max_steps")
        file.without_meaning("num_epochs", epochs, "max_steps is set, and overrides it")
    elif epochs is not None:
        file.put("training.epochs", epochs.value, epochs, "num_epochs")
    elif not file.decided("training.steps"):
        file.default("training.epochs", 1.0)
    _decay(file)
    warmup, ratio = file.take("warmup_steps"), file.take("warmup_ratio")
    if file.decided("lr_scheduler.warmup_steps"):
        pass
    elif warmup is not None:
        file.put("lr_scheduler.warmup_steps", warmup.value, warmup, "warmup_steps")
    elif ratio is not None:
        file.put("lr_scheduler.warmup_ratio", ratio.value, ratio, "warmup_ratio")
    elif steps is not None and type(steps.value) is int and steps.value > 0:
        file.default("lr_scheduler.warmup_steps", min(int(0.03 * steps.value), 100))
    else:
        file.default("lr_scheduler.warmup_ratio", 0.03)


def _decay(file: File) -> None:
    entry, (options, given) = file.take("lr_scheduler"), file.table("lr_scheduler_kwargs")
    name = "cosine" if entry is None else str(entry.value)
    least = file.take("cosine_min_lr_ratio")
    if name == "cosine_with_min_lr":
        for key, today in (("min_lr", "min_lr"), ("min_lr_rate", "min_lr_factor")):
            if key in given and options is not None:
                file.put(f"lr_scheduler.{today}", given.pop(key), options)
    elif least is not None and name == "cosine":
        file.put("lr_scheduler.min_lr_factor", least.value, least, "cosine_min_lr_ratio")
    else:
        file.without_meaning("cosine_min_lr_ratio", least, "it is for lr_scheduler: cosine")
    if given:
        reason = f"for {name}, {', '.join(map(str, given))} is not supported"
        file.refuse("lr_scheduler_kwargs", options, reason)
    if name not in SCHEDULES:
        file.refuse("lr_scheduler", entry, f"expected one of {', '.join(SCHEDULES)}")
        return
    if entry is None:
        file.default("lr_scheduler.decay_type", "cosine")
    else:
        file.put("lr_scheduler.decay_type", name.partition("_")[0], entry, "lr_scheduler")
    if name == "constant" and entry is not None:  # has no warm-up, even if the file sets one
        file.put("lr_scheduler.warmup_steps", 0, entry)
        for key in ("warmup_steps", "warmup_ratio"):
            file.ignore(key, "lr_scheduler: constant has no warm-up")


def _numbers(file: File) -> None:
    """Translates precision, recomputation and attention."""
    names = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16",
             "float32": "float32"}  # fmt: skip
    given = {name: entry for name in names if (entry := file.take(name)) is not None}
    if (half := given.get("bf16")) and not is_one_of(half.value, [True, False, "auto"]):
        file.refuse("bf16", half, "expected true, false or auto")
    asked = [name for name, entry in given.items() if entry.value is not False]
    if asked:
        name, entry = asked[0], given[asked[0]]
        kind = "auto" if entry.value == "auto" else names[name]
        file.put("training.mixed_precision_param", kind, entry, name)
    elif "bf16" in given:
        file.put("training.mixed_precision_param", "float32", given["bf16"], "bf16")
    file.switch("fp8", {"training.float8": "tensorwise"})
    attention = file.take("attn_implementation")
    if attention is not None and attention.value in ("sage", "fp8"):
        file.refuse("attn_implementation", attention, "8-bit attention is not supported")
    else:
        file.without_meaning("attn_implementation", attention, KERNELS)


def _saving(file: File) -> None:
    file.every("save", "checkpoint.interval", "the last step is always saved")
    strategy = file.take("save_strategy")
    if strategy is not None and strategy.value == "best":
        file.put("checkpoint.keep_best", 1, strategy, "save_strategy")
    else:
        reason = "checkpoint.interval counts steps; the last step is always saved"
        file.without_meaning("save_strategy", strategy, reason)
    if not file.decided("lora.base") and not file.decided("lora.rank"):
        file.default("checkpoint.last_save_in_hf", True)
    project, use, mode = (file.take(key) for key in ("wandb_project", "use_wandb", "wandb_mode"))
    asked = project if is_on(project) else use
    if is_on(asked) and (mode is None or mode.value != "disabled"):
        file.put("metrics.enable_wandb", True, asked, "wandb_project")
    file.without_meaning("wandb_project", project, WANDB)
    file.without_meaning("wandb_mode", mode, WANDB)


def _devices(file: File) -> None:
    deepspeed = file.take("deepspeed")
    if deepspeed is not None:
        name = Path(str(deepspeed.value)).stem if isinstance(deepspeed.value, str) else ""
        if "zero1" in name or "zero2" in name:
            file.put("parallelism.sharding_stage", "zero2", deepspeed, "deepspeed")
        else:
            file.without_meaning("deepspeed", deepspeed, SHARDING)
        if "offload" in name:
            file.put("training.enable_cpu_offload", True, deepspeed, "deepspeed")
    stages, (config, options) = file.take("fsdp"), file.table("fsdp_config")
    options = {key.removeprefix("fsdp_"): value for key, value in options.items()}
    for key in ("offload_params", "reshard_after_forward"):
        if key in options and config is not None:
            file.expect_bool(f"fsdp_config.{key}", Entry(options[key], config.where))
    file.without_meaning("fsdp", stages, SHARDING)
    file.without_meaning("fsdp_config", config, SHARDING)
    source = config or stages or file.first
    if options.get("offload_params") or (stages is not None and "offload" in str(stages.value)):
        file.put("training.enable_cpu_offload", True, source, "fsdp offload")
    if options.get("reshard_after_forward") is False:
        file.put("parallelism.fsdp_reshard_after_forward", "never", source, "fsdp_config")


def _rest(file: File) -> None:
    for today, value in DEFAULTS.items():
        file.default(today, value)
    plugins = file.take("plugins")
    for name in listed(plugins.value if plugins else None):
        if not any(one in str(name) for one in PLUGINS):
            file.refuse("plugins", plugins, f"{name} is not supported")
    file.without_meaning("plugins", plugins, KERNELS)
    known = (*file.asked, *WITH_OTHERS, *LORA, *PREFERENCE, *IGNORED, *REFUSED)
    for key, entry in list(file.keys.items()):
        if key in IGNORED or key.startswith(PLUGIN_KEYS):
            file.ignore(key, IGNORED.get(key, KERNELS))
        elif key in REFUSED:
            file.expect(key, entry, *REFUSED[key])
        elif key not in known:
            near = nearest_name(key, known)
            file.problems.append(Problem(UNKNOWN, entry.where, key, entry.value, near))
        else:  # depends on a key that is missing, or whose value was refused
            file.lacks(key, entry, "has no effect without datasets; remove it")
