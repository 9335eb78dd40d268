"""Data sources by name. A user's module (`job.custom_import`) adds its own: `register_source`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from overland.config.schema import Data
from overland.data.errors import DataError
from overland.data.sources import Source, StandardLibrary, TextFolder

RANDOM = "random"  # tokens without text: see `loader.RandomTokens`

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


def find_folder(name: str, data: Data) -> Path | None:
    """The folder that a dataset name stands for, if there is one."""
    if name in data.datasets:
        return Path(data.datasets[name]).expanduser()
    folder = Path(data.folder).expanduser() / name
    return folder if folder.exists() else None


def open_source(name: str, path: str | None, data: Data) -> Source:
    """The source that `dataset` (a name) and `dataset_path` (which wins) ask for."""
    if path is not None:
        return TextFolder(Path(path).expanduser())
    if name in _sources:
        return _sources[name]()
    folder = find_folder(name, data)
    if folder is None:
        raise DataError(
            f"there is no dataset {name!r}: `overland fetch dataset {name}` brings it to "
            f"{data.folder}/{name}, or set data.datasets.{name} to its folder"
        )
    return TextFolder(folder)
