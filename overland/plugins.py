"""What the core uses of the applications above it, found by name and imported when first needed, so
that a run that needs none of it neither loads nor depends on it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

PLUGINS = {
    "dialects": "overland.apps.dialects",  # config files of other trainers
    "formats": "overland.apps.convert.formats",  # checkpoints of any format
    "torch_files": "overland.apps.convert.formats.torch_save",  # pickled, read without running them
    "console": "overland.apps.console.show",  # what a run shows
    "samples": "overland.apps.evaluation.sample",  # of the model, before and after training
    "built_corpus": "overland.apps.data.built",  # its documents, to describe or evaluate them
    "train_loader": "overland.apps.data.loader",  # for a user's own script
    "exports": "overland.apps.convert.exports",  # a run's weights and adapters for other programs
    "links": "overland.apps.convert.links",  # to checkpoints, named by time
    "four_files": "overland.apps.convert.four_files",  # checkpoint.full_format = "torch"
}


def plugin(name: str) -> ModuleType:
    return import_module(PLUGINS[name])
