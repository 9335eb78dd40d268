"""Data sources by name. A user's module (`job.custom_import`) adds its own: `register_source`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from overland.config.commands import command
from overland.config.schema import Data, DataSource
from overland.data.sources import Source, StandardLibrary
from overland.data.sources import open_source as open_path
from overland.errors import DataError

RANDOM = "random"  # tokens without text: see random_blocks.py
PART = re.compile(r"stdlib:(\d+)/(\d+)")  # one of so many parts, from 0: stand-ins for a mixture

_sources: dict[str, Callable[[], Source]] = {
    "stdlib": lambda: StandardLibrary(),
    "stdlib_heldout": lambda: StandardLibrary(held_out=True),
}


def register_source(name: str, open_source: Callable[[], Source]) -> None:
    """Makes `training.dataset = NAME` read from what `open_source()` returns."""
    if name in _sources or name == RANDOM:
        raise DataError(f"a data source named {name!r} is registered already")
    _sources[name] = open_source


def source_names() -> list[str]:
    return [*_sources, RANDOM]


def is_built_in(name: str) -> bool:
    return name in _sources or name == RANDOM or PART.fullmatch(name) is not None


def is_random(name: str, wanted: DataSource) -> bool:
    return wanted.path is None and (wanted.dataset or name) == RANDOM


def find_folder(name: str, wanted: DataSource, data: Data) -> Path | None:
    """Where a source lies: at its path, or at what its name stands for, if that is a place."""
    if wanted.path is not None:
        return Path(wanted.path).expanduser()
    name = wanted.dataset or name
    if is_built_in(name):
        return None
    if name in data.datasets:
        return Path(data.datasets[name]).expanduser()
    folder = Path(data.folder).expanduser() / name
    return folder if folder.exists() else None


def open_source(name: str, wanted: DataSource, data: Data, held_out: bool = False) -> Source:
    """The source of that name; a path wins over the names that are known. `held_out`: to validate
    on, which decides the split where none is asked for."""
    folder = find_folder(name, wanted, data)
    if folder is not None:
        return open_path(
            folder,
            column=wanted.column,
            subset=wanted.subset,
            split=wanted.split,
            dtype=wanted.dtype,
            skip_bad=data.bad_documents == "skip",
            held_out=held_out,
        )
    name = wanted.dataset or name
    if name in _sources:
        return _sources[name]()
    if part := PART.fullmatch(name):
        return StandardLibrary(part=(int(part[1]), int(part[2])))
    fetch = command("overland", "fetch", "dataset", "OWNER/NAME", "--to", f"{data.folder}/{name}")
    raise DataError(
        f"there is no dataset {name!r}: `{fetch}` brings it, or set data.datasets.{name} to its "
        "folder"
    )
