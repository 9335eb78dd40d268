"""Checks that the model exists, that the user's own module can be imported, that adapters and other
changes fit the model and can be saved as asked; and makes room for new tokens."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overland.config.errors import NO_VALUE, ConfigError, Problem
from overland.config.load import Loaded, has_weights
from overland.config.schema import JobConfig, Model
from overland.data.sft import tokenizer_for_chats
from overland.errors import CheckpointError, DataError, ModelError, sentence
from overland.models.flops import outline_of, trained_parameters
from overland.models.hf_config import RMSNORM
from overland.models.lora_targets import is_adapter, is_saved_whole
from overland.models.registry import (
    build_model,
    flavor_names,
    lacks_hf_form,
    model_config,
    model_names,
)
from overland.models.structure import Role, find_module, walk_roles
from overland.models.transform import added_rule, apply_transforms, make_transforms
from overland.plugins import plugin
from overland.words import any_of

if TYPE_CHECKING:
    from torch import nn

    from overland.checkpoint.lazy import Lazy


VOCABULARY = "model.overrides.vocab_size"
# Tensor parallelism splits the rows evenly, so the new size is a multiple of the largest power of
# two, up to this, that divides the old one.
LARGEST_MULTIPLE = 128


def import_custom(config: JobConfig) -> None:
    """Imports `job.custom_import`, also from the current folder, so that it can register things."""
    name = config.job.custom_import
    if name:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        importlib.import_module(name)


def check_custom_import(loaded: Loaded) -> Iterator[Problem]:
    name = loaded.config.job.custom_import
    message = ""
    try:
        import_custom(loaded.config)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            message = "no such module in this folder or among the installed packages"
            if name.endswith(".py"):
                message += f"; a module has no .py: {Path(name).stem}, from its folder"
        else:
            message = (
                f"cannot be imported: it needs the module {error.name}, which is not installed"
            )
    except Exception as error:  # the user's code may fail in any way
        message = f"cannot be imported: {type(error).__name__}: {_first_line(error)}"
    if message:
        yield loaded.problem("job.custom_import", message)


def with_custom_import(loaded: Loaded) -> JobConfig:
    """Returns the config, once the module that it names is imported: the model, or a source of the
    data, may be custom."""
    if problems := list(check_custom_import(loaded)):
        raise ConfigError(problems)
    return loaded.config


def check_model(loaded: Loaded) -> Iterator[Problem]:
    model = loaded.config.model
    if model.config is not None and not os.path.exists(os.path.expanduser(model.config)):
        return  # a missing file, which `files` reports
    try:
        model_config(loaded.config.model)
    except ModelError as error:
        message = _first_line(error)
        if model.name not in model_names():
            key = "model.name"
        elif model.config is not None:
            key = "model.from" if loaded.is_set("model.from") else "model.config"
        elif model.flavor not in flavor_names(model.name):
            key = "model.flavor"
        else:  # the override that the message names: a file and the command line may both set some
            words = re.findall(r"\w+", message)
            named = (f"model.overrides.{name}" for name in model.overrides if name in words)
            key = next(filter(loaded.is_set, named), "model.overrides")
        value = model.config if key == "model.from" else None
        yield loaded.problem(key, message, value)


def check_length(loaded: Loaded) -> Iterator[Problem]:
    longest = getattr(model_config(loaded.config.model), "max_position_embeddings", None)
    if longest is not None and loaded.config.training.seq_len > longest:
        message = f"longer than the {longest} positions that this model supports"
        yield loaded.problem("training.seq_len", message, kind="note")


def check_export(loaded: Loaded) -> Iterator[Problem]:
    """Refuses an export at the end if Hugging Face has no equivalent of the model."""
    if not loaded.config.checkpoint.last_save_in_hf:
        return
    config, message = model_config(loaded.config.model), ""
    if lacks_hf_form(config):
        message = (
            f"{type(config).__name__} has no to_hf() of its own, so Hugging Face would load the "
            "weights as another model; write one (docs/extending.md)"
        )
    elif added := _added_by_transforms(loaded.config.model, config):
        message = (
            f"a transform adds {added}, which Hugging Face's model does not have; without it, the "
            "exported model would compute something else"
        )
    elif (norm := config.to_hf().get("norm_type", RMSNORM)) != RMSNORM:
        message = f"Hugging Face has no {config.model_type} with norm_type = '{norm}'"
    if message:
        yield loaded.problem("checkpoint.last_save_in_hf", message)


def _added_by_transforms(section: Model, config: Any) -> str | None:
    """Returns a parameter that the model has only because of a transform."""
    if not section.transforms:
        return None
    model = _transformed(section, config)
    return next((name for name, _ in model.named_parameters() if added_rule(model, name)), None)


def _transformed(section: Model, config: Any) -> nn.Module:
    """Returns the model with its transforms applied, on the meta device."""
    import torch

    with torch.device("meta"):
        model = build_model(config)
        apply_transforms(model, make_transforms(section.transforms))
    return model


def check_transforms(loaded: Loaded) -> Iterator[Problem]:
    for name, options in loaded.config.model.transforms.items():
        try:
            make_transforms({name: options})
        except ModelError as error:
            yield loaded.problem(f"model.transforms.{name}", str(error), options)


def check_sparse(loaded: Loaded) -> Iterator[Problem]:
    config, key = loaded.config, "model.sparse"
    settings = config.model.sparse
    if settings is None:
        return
    if re.fullmatch("[1-7]:[2-8]", settings.pattern) is None:
        message = "expected N:M, such as 2:4, with M at most 8"
        yield loaded.problem(f"{key}.pattern", message)
        return
    kept, group, message = *settings.ratio, ""
    if kept >= group:
        message = f"pattern = {settings.pattern} keeps all weights; expected N below {group}"
    elif config.lora.rank:
        message = (
            "adapters need frozen weights, and sparse weights are trained; choose one of the two"
        )
    elif config.training.float8 != "off":
        message = "training.float8 needs dense weights; choose one of the two"
    elif config.preference.loss in ("dpo", "ipo") and config.preference.reference != "precomputed":
        message = (
            "the reference of preference.loss would be computed with masks that keep changing; "
            "set preference.reference = precomputed"
        )
    else:
        try:
            message = _unfit_for_sparse(config, group)
        except (ModelError, OSError) as error:
            message = str(error)
    if message:
        yield loaded.problem(key, message, settings.pattern)


def _unfit_for_sparse(config: JobConfig, group: int) -> str:
    """Returns why the pattern cannot be used, if so: tensor parallelism must not split a group."""
    import torch

    from overland.models.sparse import SparseLinear, SparseWeights

    assert config.model.sparse is not None
    with torch.device("meta"):
        model = build_model(model_config(config.model))
        apply_transforms(model, [SparseWeights(config.model.sparse)])
    degree = config.parallelism.tensor_parallel_degree
    for name, role in walk_roles(model):
        module = find_module(model, name)
        if not isinstance(module, SparseLinear) or role is not Role.ROW:
            continue
        if (module.in_features // degree) % group:
            return (
                f"tensor_parallel_degree = {degree} splits the rows of {name}, of length "
                f"{module.in_features}, within groups of {group}; add it to model.sparse.exclude"
            )
    return ""


def check_freeze(loaded: Loaded) -> Iterator[Problem]:
    """Checks that every pattern freezes something, and that something is left to train."""
    key, patterns = "model.freeze", loaded.config.model.freeze
    if not patterns:
        return
    names = parameter_names(loaded.config.model)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = nearest_parameters(pattern, names)
            message = f"'{pattern}' matches no parameter; the nearest names are {near}"
            yield loaded.problem(key, message)
    if all(any(fnmatchcase(name, pattern) for pattern in patterns) for name in names):
        message = "freezes every parameter, so nothing would be trained"
        yield loaded.problem(key, message)


def nearest_parameters(pattern: str, names: Sequence[str]) -> str:
    """Returns the three names nearest to a pattern that matches nothing, with blocks merged."""
    kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return any_of([f"'{name}'" for name in get_close_matches(pattern, kinds, 3, 0.0)], "or")


def parameter_names(section: Model, all_names: bool = True) -> list[str]:
    """Returns the names of all parameters, including those that transforms add: all names of a
    shared parameter, or only the first."""
    config = model_config(section)
    if section.transforms:
        model = _transformed(section, config)
        return [name for name, _ in model.named_parameters(remove_duplicate=not all_names)]
    structure, shapes = outline_of(config)
    ties = structure.ties if all_names else ()
    return list(dict.fromkeys([*shapes, *ties]))


def check_adapter(loaded: Loaded) -> Iterator[Problem]:
    """Compares names and shapes with those of the model, and looks for values that are not
    finite."""
    key, folder = "lora.adapter", loaded.config.lora.adapter
    if folder is None:
        return
    if not Path(folder).is_dir():
        yield loaded.problem(key, "no such folder", kind="missing")
        return
    if loaded.config.model.from_ is not None:
        return  # loading reports what is wrong with it
    if loaded.config.checkpoint.initial_load_path is None:
        message = "adapters need the base model that they were trained with; set model.from"
        yield loaded.problem(key, message)
    try:
        weights = plugin("formats").open_peft(Path(folder)).weights()
        message = _misfit(weights, loaded.config)
    except (CheckpointError, OSError) as error:
        message = sentence(error)
    if message:
        yield loaded.problem(key, message)


def _misfit(weights: Mapping[str, Lazy], config: JobConfig) -> str:
    """Returns why a model cannot have these adapters; empty if it can."""
    wanted = trained_parameters(model_config(config.model), config.lora)
    missing = [name for name in wanted if name not in weights]
    extra = [name for name in weights if is_adapter(name) and name not in wanted]
    unfit = "does not fit this model: it"
    if missing:
        return f"{unfit} lacks {missing[0]}, which the model has with these settings"
    if extra:
        return f"{unfit} has {extra[0]!s:.100}, which the model does not have"
    for name, shape in wanted.items():
        if weights[name].shape != shape:
            has = f"{name} with shape {list(weights[name].shape)}"
            return f"{unfit} has {has}, but the model has {list(shape)}"
    for one, owner in ties_in(config).items():
        if owner in wanted and not _are_equal(weights.get(one), weights[owner]):
            has = f"separate matrices for {owner} and {one}"
            return f"{unfit} has {has}, which are tied in this model"
    for name in wanted:
        if not weights[name].load().float().isfinite().all():
            return f"{name} holds NaN or infinity: use another adapter, or an earlier save of it"
    return ""


def _are_equal(one: Lazy | None, other: Lazy) -> bool:
    return one is not None and one.dtype == other.dtype and one.load().equal(other.load())


def check_saved_modules(loaded: Loaded) -> Iterator[Problem]:
    """Refuses to train a tied matrix under only one of its two names."""
    lora = loaded.config.lora
    if not lora.rank or not lora.modules_to_save:
        return
    for one, owner in ties_in(loaded.config).items():
        if is_saved_whole(one, lora) and not is_saved_whole(owner, lora):
            module, other = (name.removesuffix(".weight") for name in (one, owner))
            message = (
                f"{module} is tied to {other} in this model (tie_word_embeddings); name {other}, "
                "which trains both"
            )
            yield loaded.problem("lora.modules_to_save", message)


def ties_in(config: JobConfig) -> Mapping[str, str]:
    structure, _ = outline_of(model_config(config.model))
    return structure.ties


def check_narrow_base(loaded: Loaded) -> Iterator[Problem]:
    """Refuses settings that do not work with `lora.base = nf4`."""
    config, message = loaded.config, ""
    if not config.lora.rank or config.lora.base != "nf4":
        return
    if config.checkpoint.initial_load_path is None:
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
        yield loaded.problem("lora.base", message)


def check_adapter_files(loaded: Loaded) -> Iterator[Problem]:
    """Checks `lora.save_as_peft`, and `checkpoint.last_save_in_hf` with adapters."""
    config = loaded.config
    if config.lora.save_as_peft and config.checkpoint.type == "local":
        message = (
            "checkpoint.type = local stores the parts of a tensor separately; set it to shard or "
            "full"
        )
        yield loaded.problem("lora.save_as_peft", message)
    if config.checkpoint.last_save_in_hf and config.lora.rank and config.lora.base == "nf4":
        message = (
            "would merge the adapters into 4-bit weights (lora.base = nf4), which are too coarse "
            "for that; set lora.save_as_peft instead"
        )
        yield loaded.problem("checkpoint.last_save_in_hf", message)


def check_start(loaded: Loaded) -> Iterator[Problem]:
    """Notes which parts of a model's folder are not used if it is given only as `model.config`."""
    model, weights = loaded.config.model, loaded.config.checkpoint.initial_load_path
    if model.config is None:
        return
    folder = Path(model.config).expanduser()
    grown = {"vocab_size"} if loaded.config.sft.new_tokens else set()  # noted with the tokens
    if weights is not None and (changed := _changed(model, grown)):
        message = (
            f"the weights of {weights} are loaded into a model with a different {changed} than "
            "they were trained with"
        )
        yield loaded.problem("model.overrides", message, NO_VALUE, "note")
    elif weights is None and folder.is_dir() and has_weights(folder):
        tokenizer = " and the tokenizer" if model.hf_assets_path is None else ""
        message = (
            f"only the architecture of this folder is used, and training starts from random "
            f"weights; to use its weights{tokenizer} too, set `model.from`"
        )
        yield loaded.problem("model.config", message, kind="note")


def _changed(model: Model, known: Collection[str]) -> str:
    """Describes what the overrides change in the config.json, apart from `known` keys."""
    plain = model_config(model.model_copy(update={"overrides": {}}))
    ours = model_config(model)
    changed = [
        f"{key} ({getattr(ours, key)}, not {getattr(plain, key)})"
        for key in model.overrides
        if getattr(ours, key, None) != getattr(plain, key, None) and key not in known
    ]
    return ", ".join(changed)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def with_new_tokens(loaded: Loaded) -> Loaded:
    """Returns the config with room for `sft.new_tokens`, and notes about them. The tokenizer gives
    them the ids after all others. If the model has no rows for them, `model.overrides.vocab_size`
    is set, so a run folder's config records it. Problems with the tokenizer or model are reported
    where they are opened."""
    config = loaded.config
    if not config.sft.new_tokens or config.sft.shape == "off" or not config.model.hf_assets_path:
        return loaded
    try:
        tokenizer = tokenizer_for_chats(config)
        size = model_config(config.model).vocab_size
    except (DataError, ModelError, AttributeError, OSError):
        return loaded
    first = tokenizer.vocab_size - len(tokenizer.new_tokens)
    ids = [f"{name} = {first + i:,}" for i, name in enumerate(tokenizer.new_tokens)]
    if not ids:
        note = "sft.new_tokens: the tokenizer already has all of them"
        return replace(loaded, notes=[*loaded.notes, note])
    room = "and the model already has rows for them"
    if tokenizer.vocab_size > size:
        if "vocab_size" in config.model.overrides:
            message = f"sft.new_tokens need {tokenizer.vocab_size:,}; remove it to grow as needed"
            problem = loaded.problem(VOCABULARY, message)
            raise ConfigError([problem], partial=loaded)
        grown = grown_size(size, tokenizer.vocab_size)
        config = config.having({"model.overrides": {**config.model.overrides, "vocab_size": grown}})
        room = f"so the vocabulary grows from {size:,} to {grown:,} rows ({VOCABULARY})"
    note = (
        f"sft.new_tokens: {any_of(ids, 'and')} are new, {room}; their rows start as the mean of "
        "the others"
    )
    if config.lora.rank and "embed_tokens" not in config.lora.modules_to_save:
        note += (
            ", and stay so, since only adapters are trained; lora.modules_to_save = "
            '["embed_tokens", "lm_head"] trains them'
        )
    return replace(loaded, config=config, notes=[*loaded.notes, note])


def grown_size(size: int, needed: int) -> int:
    """Returns the size of a vocabulary with room for this many tokens."""
    multiple = min(size & -size, LARGEST_MULTIPLE)  # the largest power of two that divides it
    return -(-needed // multiple) * multiple
