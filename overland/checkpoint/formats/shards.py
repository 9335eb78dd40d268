"""Files of a bounded size, and files that are on the disk when they are done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from overland.checkpoint.formats.lazy import Lazy
from overland.files import new_file, sync


def split(tensors: Mapping[str, Lazy], max_bytes: int) -> list[dict[str, Lazy]]:
    """In order, as many into each as fit; a tensor that is larger gets a file of its own."""
    shards: list[dict[str, Lazy]] = [{}]
    size = 0
    for name, lazy in tensors.items():
        if shards[-1] and size + lazy.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = lazy
        size += lazy.nbytes
    return shards


def write_json(path: Path, contents: Mapping[str, Any]) -> None:
    with new_file(path) as file:
        file.write((json.dumps(contents, indent=2, sort_keys=True) + "\n").encode())


def copy_files(files: Iterable[Path], folder: Path) -> None:
    for file in files:
        if not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
            sync(folder / file.name)


def describe(config: dict[str, Any] | None, companions: Iterable[Path], folder: Path) -> None:
    """config.json and tokenizer beside weights of a format that has no place for them: so that
    the folder still says what it holds."""
    if config is not None:
        write_json(folder / "config.json", config)
    copy_files(companions, folder)
