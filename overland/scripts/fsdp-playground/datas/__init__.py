"""Loaders by name: with `--data_name NAME`, train.py reads what `open_source(data_dir)` of the
module NAME in this folder returns, a source of documents:

    from overland.data.sources import open_source as open_files

    def open_source(data_dir):
        return open_files(data_dir, column="abstract")
"""

import os
import pkgutil
from functools import partial
from importlib import import_module


def register_loaders() -> None:
    from overland.data.registry import register_source

    for module in pkgutil.iter_modules(__path__):
        open_source = getattr(import_module(f"datas.{module.name}"), "open_source", None)
        if open_source is not None:
            register_source(module.name, partial(open_source, os.environ.get("DATA_DIR")))
