"""Data sources by name: built in, registered by a user's module, and on disk.

A user's module (`job.custom_import`) can add its own sources with `register_source`. `wanted.py`
opens those that a config names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from overland.config.schema import Data, DataSource
from overland.data.corpus_folder import is_corpus
from overland.data.sources import Source, StandardLibrary, as_source, open_source
from overland.data.sources.columns import WHOLE
from overland.errors import DataError
from overland.plugins import plugin
from overland.words import command

RANDOM = "random"  # random tokens or images: `lanes.RandomBlocks`, `lanes.RandomImages`
SHAPES, HELD_OUT_SHAPES = "shapes", "shapes_heldout"  # generated images: `shapes.ShapeImages`
MADE = (RANDOM, SHAPES, HELD_OUT_SHAPES)
# Part k of n, from 0: stand-ins for the sources of a mixture.
PART = re.compile(r"(stdlib|docstrings):(\d+)/(\d+)")

_sources: dict[str, Callable[[], Any]] = {
    "stdlib": lambda: StandardLibrary(),
    "stdlib_heldout": lambda: StandardLibrary(held_out=True),
    "docstrings": lambda: plugin("docstrings").Docstrings(),
}


def register_source(name: str, open_source: Callable[[], Any] | None = None) -> Any:
    """Makes `training.dataset = NAME` read from the source that `open_source()` returns, which
    has at least `chunks` and `read`. Usable as a decorator: `@register_source(NAME)`."""
    if open_source is None:
        return partial(register_source, name)
    if name in _sources or name in MADE:
        raise DataError(f"a data source named {name!r} is already registered")
    _sources[name] = open_source
    return open_source


def source_names() -> list[str]:
    return [*_sources, *MADE]


def is_built_in(name: str) -> bool:
    return name in _sources or name in MADE or PART.fullmatch(name) is not None


def is_made(name: str, wanted: DataSource) -> bool:
    """Whether it is generated on the fly: random tokens, random images, images of shapes."""
    return wanted.path is None and (wanted.dataset or name) in MADE


def find_folder(name: str, wanted: DataSource, data: Data) -> Path | None:
    """Returns the path of a source, or the path that its name stands for, if any."""
    if wanted.path is not None:
        return Path(wanted.path).expanduser()
    name = wanted.dataset or name
    if is_built_in(name):
        return None
    if name in data.datasets:
        return Path(data.datasets[name]).expanduser()
    folder = Path(data.folder).expanduser() / name
    return folder if folder.exists() else None


def find_built(name: str, wanted: DataSource, data: Data) -> Path | None:
    """Returns the folder of a source that is a built corpus, or None for any other source."""
    folder = find_folder(name, wanted, data)
    return folder if folder is not None and is_corpus(folder) else None


def open_by_name(name: str, wanted: DataSource, data: Data, held_out: bool = False) -> Source:
    """Opens the source of that name; a path takes precedence over known names. `held_out`: it is
    for validation, which determines the default split."""
    folder = find_folder(name, wanted, data)
    if folder is not None:
        return open_source(
            folder,
            column=wanted.column,
            subset=wanted.subset,
            split=wanted.split,
            dtype=wanted.dtype,
            skip_bad=data.bad_documents == "skip",
            held_out=held_out,
        )
    name = wanted.dataset or name
    source: Source
    if name in _sources:
        source = as_source(_sources[name]())
    elif part := PART.fullmatch(name):
        which, is_code = (int(part[2]), int(part[3])), part[1] == "stdlib"
        source = StandardLibrary(part=which) if is_code else plugin("docstrings").Docstrings(which)
    else:
        place = f"{data.folder}/{name}"
        fetch = command("overland", "fetch", "dataset", "OWNER/NAME", "--to", place)
        raise DataError(
            f"there is no dataset {name!r}: download it with `{fetch}`, or set "
            f"data.datasets.{name} to its folder"
        )
    if source.kind == "records" and wanted.column != WHOLE:
        raise DataError(f'{name} contains questions and answers: set sft.shape = "auto"')
    return source
