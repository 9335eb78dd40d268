"""Packages that only some formats need, imported when one of them is read."""

from __future__ import annotations

import importlib
from typing import Any

from overland.data.errors import DataError


def need(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != package:
            raise
        raise DataError(f"{what} needs {package}: pip install 'overland[data]'") from None
