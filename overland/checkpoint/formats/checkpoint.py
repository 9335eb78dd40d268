"""A checkpoint of any format, as all readers give it and all writers take it.

Its tensors have the names of a run's own state and are read one by one: `model.<Hugging Face
name>`, `optimizer.<name>.<state>` (of AdamW: exp_avg and exp_avg_sq), `optimizer.num_updates`.
Whatever else a file holds keeps the name it has there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overland.checkpoint.formats.lazy import Lazy, Slices, held
from overland.checkpoint.origin import Origin
from overland.errors import CheckpointError
from overland.files import leads_out, new_file, read_json, sync

Config = dict[str, Any] | None
"""The contents of a config.json, where there is one."""

MODEL, OPTIMIZER, NUM_UPDATES = "model.", "optimizer.", "optimizer.num_updates"
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state, as torch and DeepSpeed name it

DEFAULT_SHARD_BYTES = 5 * 1000**3

# What lies beside weights and belongs to them.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


@dataclass
class LazyCheckpoint:
    """What readers give and writers take. `extras`: step, batch, tokens, best_validation_loss,
    learning rates and `param_groups` (torch's, with parameter names) where the format has them.
    `config`: a config.json's contents. `companions`: tokenizer and generation config. `adapter`: an
    adapter_config.json's contents, where there are adapters. `left_out`: weights that are needed
    and are elsewhere."""

    format: str
    folder: Path
    tensors: dict[str, Lazy]
    extras: dict[str, Any] = field(default_factory=dict)
    config: Config = None
    companions: list[Path] = field(default_factory=list)
    adapter: Config = None
    left_out: Origin | None = None

    @property
    def own_model(self) -> str | None:
        """The config class of a run's model, if it is one that a user registered."""
        name: str | None = (self.extras.get("run") or {}).get("own_model")
        return name

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        return self.tensors[name].load()

    def read_slice(self, name: str, slices: Slices) -> Tensor:
        return self.tensors[name].load_slice(slices)

    def weights(self) -> dict[str, Lazy]:
        """The model's tensors by their Hugging Face names."""
        return {
            name.removeprefix(MODEL): lazy
            for name, lazy in self.tensors.items()
            if name.startswith(MODEL)
        }

    def states(self) -> Iterator[tuple[str, str, Lazy]]:
        """Yields what an optimizer has kept: (parameter, name of the state, tensor)."""
        for name, lazy in self.tensors.items():
            if (state := split_state(name, self.tensors)) is not None:
                yield *state, lazy

    def with_tensors(self, tensors: dict[str, Lazy]) -> LazyCheckpoint:
        return replace(self, tensors=tensors)


def split_state(name: str, tensors: Container[str]) -> tuple[str, str] | None:
    """`optimizer.<parameter>.<state>` taken apart, if the parameter is one of the model's."""
    parameter, _, kind = name.removeprefix(OPTIMIZER).rpartition(".")
    is_state = name.startswith(OPTIMIZER) and (MODEL + parameter in tensors or kind in MOMENTS)
    return (parameter, kind) if is_state else None


def num_updates(steps: list[float]) -> dict[str, Lazy]:
    """The optimizer's count of updates as an entry; Overland has one, other formats one per
    parameter, which differ only for those that were frozen for a time."""
    if not steps:
        return {}
    return {NUM_UPDATES: held(torch.tensor(float(max(steps)), dtype=torch.float32))}


def companions_in(folder: Path) -> list[Path]:
    found = [folder / name for name in COMPANIONS if (folder / name).is_file()]
    for path in found:
        refuse_link_out(path)
    return found


def refuse_link_out(path: Path) -> None:
    """Refuses a link out of its folder: what is copied beside weights must be a file of their
    folder: a folder that came from others could name any file of this machine by a link."""
    if leads_out(path, path.parent):
        raise CheckpointError(
            f"{path} is a link out of its folder, to {path.resolve()}: put a copy in its place if "
            "it belongs there, or remove it"
        )


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        contents = read_json(path)
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} holds a {type(contents).__name__}, expected an object")
    return contents


def config_near(*folders: Path) -> Config:
    """config.json of the first folder that has one."""
    for folder in folders:
        if (folder / "config.json").is_file():
            refuse_link_out(folder / "config.json")
            return read_json_object(folder / "config.json")
    return None


@dataclass(frozen=True)
class Options:
    """What can be chosen about a target. `names` and `key_prefix` are for DCP; `partial`: tensors
    were left out on purpose."""

    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    names: str = "hf"
    key_prefix: str | None = None
    partial: bool = False


def split_by_size(tensors: Mapping[str, Lazy], max_bytes: int) -> list[dict[str, Lazy]]:
    """Splits tensors, in order, as many into each file as fit; a tensor that is larger gets a file
    of its own."""
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


def write_companions(
    config: dict[str, Any] | None, companions: Iterable[Path], folder: Path
) -> None:
    """config.json and tokenizer beside weights of a format that has no place for them: so that
    the folder still says what it holds."""
    if config is not None:
        write_json(folder / "config.json", config)
    copy_files(companions, folder)
