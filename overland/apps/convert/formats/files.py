"""The files of formats that hold a model in a folder: what describes it, and how its weights are
divided."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from overland.arguments import dtype_name
from overland.checkpoint.lazy import Config, Lazy, LazyCheckpoint
from overland.data.tokenizer_files import refuse_link_out
from overland.errors import CheckpointError
from overland.files import new_file, read_json, sync
from overland.words import did_you_mean

# Frequencies that some models store although they follow from the config.
COMPUTED = ("rope.freqs", "freqs_cis", "rotary_emb.inv_freq")

DEFAULT_SHARD_BYTES = 5 * 1000**3
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def is_computed(name: str) -> bool:
    """Whether a tensor follows from the config, so that no model has to load it."""
    return name.endswith(COMPUTED)


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        contents = read_json(path)
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} holds a {type(contents).__name__}, expected an object")
    return contents


def config_near(*folders: Path) -> Config:
    """Returns the config.json of the first folder that has one."""
    for folder in folders:
        if (folder / "config.json").is_file():
            refuse_link_out(folder / "config.json")
            return read_json_object(folder / "config.json")
    return None


def given_config(path: Path | None) -> Config:
    """Returns the contents of a config.json, given by its path or that of its folder."""
    if path is None:
        return None
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"--config {path}: {file} does not exist")
    return read_json_object(file)


def given_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    name = dtype_name(dtype)
    if name is not None and name not in DTYPES:
        raise CheckpointError(f"--dtype {name} is unknown{did_you_mean(name, DTYPES)}")
    return None if name is None else DTYPES[name]


@dataclass(frozen=True)
class Options:
    """Options of the target format. `names` and `key_prefix` are for DCP; `partial`: tensors were
    left out on purpose."""

    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    names: str = "hf"
    key_prefix: str | None = None
    partial: bool = False


def split_by_size(tensors: Mapping[str, Lazy], max_bytes: int) -> list[dict[str, Lazy]]:
    """Splits tensors, in order, into files of at most `max_bytes`; a larger tensor gets its own
    file."""
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


def write_companions(source: LazyCheckpoint, folder: Path) -> None:
    """Writes config.json and tokenizer next to weights in a format that cannot store them, so that
    the folder still describes its model."""
    if source.config is not None:
        write_json(folder / "config.json", source.config)
    copy_files(source.companions, folder)
