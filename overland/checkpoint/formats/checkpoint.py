"""A checkpoint of any format: the type that all readers return and all writers accept.

Its tensors are read one by one and named like a run's own state: `model.<Hugging Face name>`,
`optimizer.<name>.<state>` (for AdamW: exp_avg and exp_avg_sq), `optimizer.num_updates`. Everything
else in a file keeps its name.
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
from overland.words import nearest_name

Config = dict[str, Any] | None
"""The contents of a config.json, if there is one."""

MODEL, OPTIMIZER, NUM_UPDATES = "model.", "optimizer.", "optimizer.num_updates"
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state, as torch and DeepSpeed name it

# Frequencies that some models store although they follow from the config.
COMPUTED = ("rope.freqs", "freqs_cis", "rotary_emb.inv_freq")

DEFAULT_SHARD_BYTES = 5 * 1000**3

# Files next to weights that belong to them.
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


def is_computed(name: str) -> bool:
    """Whether a tensor follows from the config, so that no model has to load it."""
    return name.endswith(COMPUTED)


@dataclass
class LazyCheckpoint:
    """What readers return and writers accept. `extras`: step, batch, tokens, best_validation_loss,
    learning rates and `param_groups` (torch's, with parameter names) if the format has them.
    `config`: the contents of a config.json. `companions`: tokenizer and generation config.
    `adapter`: the contents of an adapter_config.json, if there are adapters. `left_out`: weights
    that are needed but stored elsewhere."""

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
        """The config class of a run's model, if a user registered it."""
        name: str | None = (self.extras.get("run") or {}).get("own_model")
        return name

    def read(self, name: str) -> Tensor:
        """Returns the whole tensor, on the CPU."""
        return self._tensor(name).load()

    def read_slice(self, name: str, slices: Slices) -> Tensor:
        return self._tensor(name).load_slice(slices)

    def _tensor(self, name: str) -> Lazy:
        if name in self.tensors:
            return self.tensors[name]
        near = nearest_name(str(name), self.tensors)
        advice = f"did you mean {near!r}?" if near else "its `tensors` lists all of them"
        raise CheckpointError(f"{self.folder} has no tensor {name!r}; {advice}")

    def weights(self) -> dict[str, Lazy]:
        """Returns the model's tensors by their Hugging Face names."""
        return {
            name.removeprefix(MODEL): lazy
            for name, lazy in self.tensors.items()
            if name.startswith(MODEL)
        }

    def states(self) -> Iterator[tuple[str, str, Lazy]]:
        """Yields the optimizer state: (parameter, name of the state, tensor)."""
        for name, lazy in self.tensors.items():
            if (state := split_state(name, self.tensors)) is not None:
                yield *state, lazy

    def with_tensors(self, tensors: dict[str, Lazy]) -> LazyCheckpoint:
        return replace(self, tensors=tensors)


def split_state(name: str, tensors: Container[str]) -> tuple[str, str] | None:
    """Splits `optimizer.<parameter>.<state>`; None if there is no such parameter in the model."""
    parameter, _, kind = name.removeprefix(OPTIMIZER).rpartition(".")
    is_state = name.startswith(OPTIMIZER) and (MODEL + parameter in tensors or kind in MOMENTS)
    return (parameter, kind) if is_state else None


def num_updates(steps: list[float]) -> dict[str, Lazy]:
    """Returns the optimizer's count of updates as an entry. Overland has one; other formats have
    one per parameter, which differ only for parameters that were frozen for a time."""
    if not steps:
        return {}
    return {NUM_UPDATES: held(torch.tensor(float(max(steps)), dtype=torch.float32))}


def companions_in(folder: Path) -> list[Path]:
    found = [folder / name for name in COMPANIONS if (folder / name).is_file()]
    for path in found:
        refuse_link_out(path)
    return found


def refuse_link_out(path: Path) -> None:
    """Raises for a link that leads out of its folder. Only files of the folder itself may be copied
    with the weights: a folder from somebody else could link to any file on this machine."""
    if leads_out(path, path.parent):
        raise CheckpointError(
            f"{path} is a link that leads out of its folder, to {path.resolve()}: replace it with "
            "a copy if it belongs there, or remove it"
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
    """Returns the config.json of the first folder that has one."""
    for folder in folders:
        if (folder / "config.json").is_file():
            refuse_link_out(folder / "config.json")
            return read_json_object(folder / "config.json")
    return None


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


def write_companions(
    config: dict[str, Any] | None, companions: Iterable[Path], folder: Path
) -> None:
    """Writes config.json and tokenizer next to weights in a format that cannot store them, so that
    the folder still describes its model."""
    if config is not None:
        write_json(folder / "config.json", config)
    copy_files(companions, folder)
