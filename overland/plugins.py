"""What lower layers use from the applications above them, found by name and imported when first
needed; and optional packages, which raise an error that names the extra to install if they are
missing. A run that needs none of the applications neither loads nor depends on them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from overland.errors import DataError, OverlandError

PLUGINS = {
    "dialects": "overland.apps.dialects",  # config files of other trainers
    "adapters": "overland.apps.dialects.peft",  # settings of adapters that PEFT has saved
    "formats": "overland.apps.convert.formats",  # checkpoints of any format
    "torch_files": "overland.apps.convert.formats.torch_save",  # pickled, read without running them
    "console": "overland.apps.console.show",  # what a run shows
    "screen": "overland.apps.console.screen",  # what waits for the first step, without torch
    "separate_rows": "overland.apps.check.separate_rows",  # of a model or objective of one's own
    "history": "overland.apps.watch.history",  # what a run has logged, for its result
    "samples": "overland.apps.evaluation.sample",  # of the model, before and after training
    "tokenizer_training": "overland.apps.data.tokenizer_training",  # for text without one
    "mds": "overland.apps.data.mds",  # data of other trainers
    "megatron": "overland.apps.data.megatron",
    "chat_notes": "overland.apps.data.chat_notes",  # how a run reads its conversations
    "standard_library": "overland.apps.data.standard_library",  # data to try things with
    "docstrings": "overland.apps.data.docstrings",
    "made_rows": "overland.apps.data.made_rows",  # random tokens, generated images
    "built_corpus": "overland.apps.data.built",  # its documents, to describe or evaluate them
    "train_loader": "overland.apps.data.loader",  # for a user's own script
    "exports": "overland.apps.convert.exports",  # a run's weights and adapters for other programs
    "streams": "overland.apps.streams",  # the console that preflight draws on
    "four_files": "overland.apps.convert.formats.torch",  # checkpoint.full_format = "torch"
}


def plugin(name: str) -> ModuleType:
    return import_module(PLUGINS[name])


def need(
    module: str,
    what: str,
    extra: str = "data",
    error: type[OverlandError] = DataError,
    note: str = "",
) -> Any:
    """Returns the module, or raises an error that says what needs it and how to install it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0]
        if missing.name is not None and missing.name.partition(".")[0] != package:
            raise
        raise error(f"{what} needs {package}: pip install 'overland[{extra}]'{note}") from None
