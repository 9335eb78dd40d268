"""Optional packages: imported when needed; the error for a missing one names the extra to
install."""

from __future__ import annotations

import importlib
from typing import Any

from overland.errors import DataError, OverlandError


def need(
    module: str,
    what: str,
    extra: str = "data",
    error: type[OverlandError] = DataError,
    note: str = "",
) -> Any:
    """Returns the module, or raises an error that says what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0]
        if missing.name is not None and missing.name.partition(".")[0] != package:
            raise
        raise error(f"{what} needs {package}: pip install 'overland[{extra}]'{note}") from None
