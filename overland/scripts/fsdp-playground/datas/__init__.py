"""Loaders by name: with `--data_name NAME`, train.py reads the documents of the source that
`open_source(data_dir)` returns in the module NAME of this folder:

    from overland.data.sources import open_source as open_files

    def open_source(data_dir):
        return open_files(data_dir, column="abstract")
"""

import os
import pkgutil
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any


def loaders() -> dict[str, Callable[[str | None], Any]]:
    """Returns the `open_source` of each module in this folder that has one."""
    modules = {
        one.name: import_module(f"datas.{one.name}") for one in pkgutil.iter_modules(__path__)
    }
    return {
        name: module.open_source
        for name, module in modules.items()
        if hasattr(module, "open_source")
    }


def register_loaders() -> None:
    from overland.data.registry import register_source

    for name, open_source in loaders().items():
        register_source(name, partial(open_source, os.environ.get("DATA_DIR")))
