"""Checks that the model exists and that the user's own module can be imported, and makes room for
new tokens."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overland.config.errors import ConfigError, Problem
from overland.config.load import Loaded, has_weights
from overland.config.schema import JobConfig, Model
from overland.data.sft import tokenizer_for_chats
from overland.errors import DataError, ModelError
from overland.models.flops import outline_of
from overland.models.hf_config import RMSNORM
from overland.models.registry import (
    build_model,
    flavor_names,
    lacks_hf_form,
    model_config,
    model_names,
)
from overland.models.structure import Role, find_module, walk_roles
from overland.models.transform import added_rule, apply_transforms, make_transforms
from overland.words import any_of

if TYPE_CHECKING:
    from torch import nn


Check = Callable[[Loaded], Iterator[Problem]]
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


def needs_model(check: Check) -> Check:
    """Ends a check in silence if the model cannot be built, which `check_model` reports."""

    @wraps(check)
    def checked(loaded: Loaded) -> Iterator[Problem]:
        with suppress(ModelError, OSError):
            yield from check(loaded)

    return checked


def check_custom_import(loaded: Loaded) -> Iterator[Problem]:
    key, name = "job.custom_import", loaded.config.job.custom_import
    try:
        import_custom(loaded.config)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            message = "no such module in this folder or among the installed packages"
        else:
            message = (
                f"cannot be imported: it needs the module {error.name}, which is not installed"
            )
        yield Problem(message, loaded.where(key), key, name)
    except Exception as error:  # the user's code may fail in any way
        message = f"cannot be imported: {type(error).__name__}: {_first_line(error)}"
        yield Problem(message, loaded.where(key), key, name)


def check_model(loaded: Loaded) -> Iterator[Problem]:
    model = loaded.config.model
    if model.config is not None and not os.path.exists(os.path.expanduser(model.config)):
        return  # a missing file, which `files` reports
    try:
        model_config(loaded.config.model)
    except ModelError as error:
        if model.name not in model_names():
            key = "model.name"
        elif model.config is not None:
            key = "model.from" if loaded.is_set("model.from") else "model.config"
        elif model.flavor not in flavor_names(model.name):
            key = "model.flavor"
        else:
            yield _override_problem(loaded, _first_line(error))
            return
        value = getattr(model, key.partition(".")[2].replace("from", "config"))
        yield Problem(_first_line(error), loaded.where(key), key, value)


@needs_model
def check_length(loaded: Loaded) -> Iterator[Problem]:
    config, key = model_config(loaded.config.model), "training.seq_len"
    length = loaded.config.training.seq_len
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        message = f"longer than the {longest} positions that this model supports"
        yield Problem(message, loaded.where(key), key, length, kind="note")


@needs_model
def check_export(loaded: Loaded) -> Iterator[Problem]:
    """Refuses an export at the end if Hugging Face has no equivalent of the model."""
    key = "checkpoint.last_save_in_hf"
    if not loaded.config.checkpoint.last_save_in_hf:
        return
    config = model_config(loaded.config.model)
    if lacks_hf_form(config):
        message = (
            f"{type(config).__name__} has no to_hf() of its own, so Hugging Face would load the "
            "weights as another model; write one (docs/extending.md)"
        )
        yield Problem(message, loaded.where(key), key, True)
    elif added := _added_by_transforms(loaded.config.model, config):
        message = (
            f"a transform adds {added}, which Hugging Face's model does not have; without it, the "
            "exported model would compute something else"
        )
        yield Problem(message, loaded.where(key), key, True)
    elif (norm := config.to_hf().get("norm_type", RMSNORM)) != RMSNORM:
        message = f"Hugging Face has no {config.model_type} with norm_type = '{norm}'"
        yield Problem(message, loaded.where(key), key, True)


def _added_by_transforms(section: Model, config: Any) -> str | None:
    """Returns a parameter that the model has only because of a transform."""
    if not section.transforms:
        return None
    try:
        model = _transformed(section, config)
    except ModelError:  # another check reports it
        return None
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
        key = f"model.transforms.{name}"
        try:
            make_transforms({name: options})
        except ModelError as error:
            yield Problem(str(error), loaded.where(key), key, options)


def check_sparse(loaded: Loaded) -> Iterator[Problem]:
    config, key = loaded.config, "model.sparse"
    settings = config.model.sparse
    if settings is None:
        return
    if re.fullmatch("[1-7]:[2-8]", settings.pattern) is None:
        message = "expected N:M, such as 2:4, with M at most 8"
        yield Problem(message, loaded.where(key), f"{key}.pattern", settings.pattern)
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
        yield Problem(message, loaded.where(key), key, settings.pattern)


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


@needs_model
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
            yield Problem(message, loaded.where(key), key, patterns)
    if all(any(fnmatchcase(name, pattern) for pattern in patterns) for name in names):
        message = "freezes every parameter, so nothing would be trained"
        yield Problem(message, loaded.where(key), key, patterns)


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


def check_start(loaded: Loaded) -> Iterator[Problem]:
    """Notes which parts of a model's folder are not used if it is given only as `model.config`."""
    model, weights = loaded.config.model, loaded.config.checkpoint.initial_load_path
    folder = Path(model.config or "").expanduser()
    grown = {"vocab_size"} if loaded.config.sft.new_tokens else set()  # noted with the tokens
    if model.config is not None and weights is not None and (changed := _changed(model, grown)):
        key = "model.overrides"
        message = (
            f"the weights of {weights} are loaded into a model with a different {changed} than "
            "they were trained with"
        )
        yield Problem(message, loaded.where(key), key, kind="note")
    if model.config is None or weights is not None or not folder.is_dir():
        return
    if has_weights(folder):
        tokenizer = " and the tokenizer" if model.hf_assets_path is None else ""
        message = (
            f"only the architecture of this folder is used, and training starts from random "
            f"weights; to use its weights{tokenizer} too, set `model.from`"
        )
        yield Problem(
            message, loaded.where("model.config"), "model.config", model.config, kind="note"
        )


def _changed(model: Model, known: Collection[str]) -> str:
    """Describes what the overrides change in the config.json, apart from `known` keys."""
    try:
        plain = model_config(model.model_copy(update={"overrides": {}}))
        ours = model_config(model)
    except (ModelError, OSError):
        return ""
    changed = [
        f"{key} ({getattr(ours, key)}, not {getattr(plain, key)})"
        for key in model.overrides
        if getattr(ours, key, None) != getattr(plain, key, None) and key not in known
    ]
    return ", ".join(changed)


def _override_problem(loaded: Loaded, message: str) -> Problem:
    """Returns the problem at the override that the message names, where that was set: a file and
    the command line may both set some."""
    overrides = loaded.config.model.overrides
    named = [name for name in overrides if re.search(rf"\b{re.escape(name)}\b", message)]
    for name in named:
        key = f"model.overrides.{name}"
        if loaded.is_set(key):
            return Problem(message, loaded.where(key), key, overrides[name])
    key = "model.overrides"
    return Problem(message, loaded.where(key), key, overrides)


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
            problem = Problem(message, loaded.where("model.overrides"), VOCABULARY, size)
            raise ConfigError([problem], partial=loaded)
        grown = grown_size(size, tokenizer.vocab_size)
        config = with_vocabulary(config, grown)
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


def with_vocabulary(config: JobConfig, size: int) -> JobConfig:
    overrides = {**config.model.overrides, "vocab_size": size}
    model = config.model.model_copy(update={"overrides": overrides})
    return config.model_copy(update={"model": model})
