"""Checks that adapters to continue from fit the model, and that new ones can be saved as asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from overland.checks.model import needs_model
from overland.config.errors import Problem
from overland.config.load import Loaded
from overland.config.schema import JobConfig
from overland.errors import CheckpointError, sentence
from overland.models.flops import outline_of, trained_parameters
from overland.models.lora_targets import is_adapter, is_saved_whole
from overland.models.registry import model_config
from overland.plugins import plugin

if TYPE_CHECKING:
    from overland.checkpoint.lazy import Lazy


@needs_model
def check_adapter(loaded: Loaded) -> Iterator[Problem]:
    """Compares names and shapes with those of the model, and looks for values that are not
    finite."""
    key, folder = "lora.adapter", loaded.config.lora.adapter
    if folder is None:
        return
    if not Path(folder).is_dir():
        yield Problem("no such folder", loaded.where(key), key, folder, kind="missing")
        return
    if loaded.config.model.from_ is not None:
        return  # loading reports what is wrong with it
    if loaded.config.checkpoint.initial_load_path is None:
        message = "adapters need the base model that they were trained with; set model.from"
        yield Problem(message, loaded.where(key), key, folder)
    wanted = trained_parameters(model_config(loaded.config.model), loaded.config.lora)
    try:
        weights: Mapping[str, Lazy] = plugin("formats").open_peft(Path(folder)).weights()
        found = {name: lazy.shape for name, lazy in weights.items()}
    except (CheckpointError, OSError) as error:
        yield Problem(str(error), loaded.where(key), key, folder)
        return
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if is_adapter(name) and name not in wanted]
    other = [name for name in wanted if name in found and found[name] != wanted[name]]
    tied = [
        (one, owner)
        for one, owner in ties_in(loaded.config).items()
        if owner in wanted
        and owner in found
        and (one not in found or not _are_equal(weights[one], weights[owner]))
    ]
    if missing:
        message = f"lacks {missing[0]}, which the model has with these settings"
    elif extra:
        message = f"has {extra[0]!s:.100}, which the model does not have"
    elif other:
        name = other[0]
        message = (
            f"has {name} with shape {list(found[name])}, but the model has {list(wanted[name])}"
        )
    elif tied:
        one, owner = tied[0]
        message = f"has separate matrices for {owner} and {one}, which are tied in this model"
    else:
        yield from _damaged(loaded, {name: weights[name] for name in wanted})
        return
    yield Problem(f"does not fit this model: it {message}", loaded.where(key), key, folder)


def _are_equal(one: Lazy, other: Lazy) -> bool:
    return one.dtype == other.dtype and one.load().equal(other.load())


def _damaged(loaded: Loaded, adapters: Mapping[str, Lazy]) -> Iterator[Problem]:
    key = "lora.adapter"
    where, folder = loaded.where(key), loaded.config.lora.adapter
    for name, lazy in adapters.items():
        try:
            if lazy.load().float().isfinite().all():
                continue
            message = f"{name} holds NaN or infinity: use another adapter, or an earlier save of it"
        except (CheckpointError, OSError) as error:
            message = sentence(error)
        yield Problem(message, where, key, folder)
        return


@needs_model
def check_saved_modules(loaded: Loaded) -> Iterator[Problem]:
    """Refuses to train a tied matrix under only one of its two names."""
    key, lora = "lora.modules_to_save", loaded.config.lora
    if not lora.rank or not lora.modules_to_save:
        return
    for one, owner in ties_in(loaded.config).items():
        if is_saved_whole(one, lora) and not is_saved_whole(owner, lora):
            module, other = (name.removesuffix(".weight") for name in (one, owner))
            message = (
                f"{module} is tied to {other} in this model (tie_word_embeddings); name {other}, "
                "which trains both"
            )
            yield Problem(message, loaded.where(key), key, lora.modules_to_save)


def ties_in(config: JobConfig) -> Mapping[str, str]:
    structure, _ = outline_of(model_config(config.model))
    return structure.ties


def check_narrow_base(loaded: Loaded) -> Iterator[Problem]:
    """Refuses settings that do not work with `lora.base = nf4`."""
    config, key = loaded.config, "lora.base"
    if not config.lora.rank or config.lora.base != "nf4":
        return
    source = config.checkpoint.initial_load_path
    message = ""
    if source is None:
        message = "needs trained weights to quantize; set model.from"
    elif config.checkpoint.type != "shard" and config.checkpoint.enable:
        message = (
            f"checkpoint.type = {config.checkpoint.type} would also save the frozen weights in 4 "
            "bits, which nothing else can read; set it to shard, which leaves them out"
        )
    elif config.parallelism.tensor_parallel_degree > 1:
        message = "tensor parallelism splits rows, whose 4-bit weights share scales; shard instead"
    elif config.training.float8 != "off":
        message = "training.float8 needs unquantized weights; choose one of the two"
    if message:
        yield Problem(message, loaded.where(key), key, "nf4")


def check_adapter_files(loaded: Loaded) -> Iterator[Problem]:
    """Checks `lora.save_as_peft`, and `checkpoint.last_save_in_hf` with adapters."""
    config, key = loaded.config, "lora.save_as_peft"
    if config.lora.save_as_peft:
        message = ""
        if not config.lora.rank:
            message = "there are no adapters to save; set lora.rank"
        elif not config.checkpoint.enable:
            message = "adapters are saved with checkpoints; set checkpoint.enable = true"
        elif config.checkpoint.type == "local":
            message = (
                "checkpoint.type = local stores the parts of a tensor separately; set it to shard "
                "or full"
            )
        if message:
            yield Problem(message, loaded.where(key), key, True)
    key = "checkpoint.last_save_in_hf"
    if config.checkpoint.last_save_in_hf and config.lora.rank and config.lora.base == "nf4":
        message = (
            "would merge the adapters into 4-bit weights (lora.base = nf4), which are too coarse "
            "for that; set lora.save_as_peft instead"
        )
        yield Problem(message, loaded.where(key), key, True)
