"""The model exists, and the user's own module can be imported."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator

from overland.config.errors import Problem
from overland.config.load import Loaded
from overland.config.schema import JobConfig
from overland.models.errors import ModelError
from overland.models.registry import flavor_names, model_config, model_names


def import_custom(config: JobConfig) -> None:
    """Imports `job.custom_import`, also from the current folder, for what it registers."""
    name = config.job.custom_import
    if name:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        importlib.import_module(name)


def check_custom_import(loaded: Loaded) -> Iterator[Problem]:
    key, name = "job.custom_import", loaded.config.job.custom_import
    try:
        import_custom(loaded.config)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            message = "no such module here or in the installed packages"
        else:
            message = f"its import fails: it needs the module {error.name}, which is not there"
        yield Problem(message, loaded.where(key), key, name)
    except Exception as error:  # the user's code may fail in any way at all
        message = f"its import fails: {type(error).__name__}: {_first_line(error)}"
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
            key = "model.config"
        elif model.flavor not in flavor_names(model.name):
            key = "model.flavor"
        else:
            key = "model.overrides"
        value = getattr(model, key.partition(".")[2])
        yield Problem(_first_line(error), loaded.where(key), key, value)


def check_length(loaded: Loaded) -> Iterator[Problem]:
    length = loaded.config.training.seq_len
    try:
        config = model_config(loaded.config.model)
    except (ModelError, OSError):
        return
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        key = "training.seq_len"
        message = f"longer than the {longest} positions this model was made for"
        yield Problem(message, loaded.where(key), key, length, kind="note")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
