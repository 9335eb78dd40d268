"""Reads and writes plain torch.distributed.checkpoint folders, as `dcp.save` and `dcp.load` do,
with optimizer state, and also under torchtitan's names.

`.metadata` is a pickle that lists the boxes of each tensor and where they are; each box is a small
torch.save file inside a `.distcp` file. The metadata is read as inert data. torch's own writer
keeps every tensor in memory until the end, so here files are written tensor by tensor.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overland.apps.convert.formats.lazy import (
    MAX_DIMS,
    Config,
    LazyCheckpoint,
    Options,
    Stored,
    Tiled,
    config_near,
    held,
    is_tiled_by,
    num_updates,
    split_by_size,
    split_state,
    write_companions,
)
from overland.apps.convert.formats.meta import (
    check_is_plain_llama,
    has_meta_names,
    head_dim_of,
    meta_name,
    to_hf_names,
    to_meta_names,
)
from overland.apps.convert.formats.pickles import StandIn, load_pickle
from overland.apps.convert.formats.safe_globals import SAFE_GLOBALS
from overland.apps.convert.formats.torch_save import read_torch_file, scalar, write_torch_file
from overland.checkpoint.lazy import MODEL, MOMENTS, NUM_UPDATES, OPTIMIZER, Lazy, Shape
from overland.errors import CheckpointError
from overland.files import new_file, read_object

METADATA = ".metadata"
# About 140 bytes per part of a tensor: this allows for ten million parts.
MAX_METADATA_BYTES = 2**30

Key = tuple[str, ...]
"""The path of an entry in the nested state dict; its flat name joins it with dots."""


def detect_dcp(path: Path) -> bool:
    return (path / METADATA).is_file()


RUN = "overland_run"
"""The entry of our own DCP folders with the facts of a run: its data plan, config, progress."""
PROGRESS = {  # where other trainers write it: torchtitan calls the tokens ntokens_seen
    "step": ("train_state.step", "step"),
    "batch": ("train_state.batch",),
    "tokens": ("train_state.ntokens_seen", "train_state.tokens_seen"),
}


def open_dcp(path: Path, config: Config = None) -> LazyCheckpoint:
    """Opens a DCP folder. Torchtitan's names require the config, for the order of rotary rows."""
    tensors, objects = read_dcp(path)
    config = config or config_near(path, path.parent)
    prefix = _model_prefix(tensors.keys() | objects.keys())
    weights = {
        name.removeprefix(prefix): lazy
        for name, lazy in tensors.items()
        if (name.startswith(prefix) if prefix else not name.startswith(_OTHERS))
    }
    rest = {
        name: lazy for name, lazy in tensors.items() if name.removeprefix(prefix) not in weights
    }
    states, steps, rest = _states(rest, objects, weights)
    if has_meta_names(weights):
        head_dim = head_dim_of(config, f"{path} has torchtitan's names and")
        weights = to_hf_names(weights, head_dim)
        renamed = [(to_hf_names({name: one}, head_dim), kind)
                   for (name, kind), one in states.items()]  # fmt: skip
        states = {(name, kind): one for named, kind in renamed for name, one in named.items()}
    canonical = {MODEL + name: lazy for name, lazy in weights.items()}
    canonical |= {f"{OPTIMIZER}{name}.{kind}": lazy for (name, kind), lazy in states.items()}
    return LazyCheckpoint(
        "dcp",
        path,
        canonical | num_updates(steps) | rest,
        extras=_extras(path, tensors, objects),
        config=config,
    )


def read_dcp(path: Path) -> tuple[dict[str, Lazy], dict[str, Any]]:
    """Returns tensors and other objects by their own keys."""
    metadata = _read_metadata(path)
    places = {
        (index.get("fqn"), _shape(index.get("offset"))): info
        for index, info in metadata.get("storage_data").items()
    }
    tensors: dict[str, Lazy] = {}
    objects: dict[str, Any] = {}
    for name, entry in metadata.get("state_dict_metadata").items():
        if entry.kind.endswith(".BytesStorageMetadata"):
            objects[name] = read_torch_file(*_place(path, places[name, None]))
        else:
            tensors[name] = _tensor(path, name, entry, places)
    return tensors, objects


def _place(folder: Path, info: Any) -> tuple[Path, int, int]:
    """Returns the file of an item, its first byte there and its length."""
    if info.get("transform_descriptors"):
        raise CheckpointError(
            f"{folder} was saved with a DCP extension (compression?), which is not supported"
        )
    path = _file_inside(folder, info.get("relative_path"), folder / METADATA)
    offset, length = info.get("offset"), info.get("length")
    if type(offset) is not int or type(length) is not int:
        raise CheckpointError(f"{folder / METADATA} has no position for an item in {path.name}")
    return path, offset, length


def _file_inside(folder: Path, name: Any, named_by: Path) -> Path:
    """Returns the path of a file that another file names; it must be in the same folder."""
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise CheckpointError(
            f"{named_by} names the file {name!r}, which is not a plain file name; files outside "
            f"{folder} are not opened"
        )
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{folder} lacks {name}, which {named_by.name} names")
    return path


@dataclass(frozen=True, eq=False)
class _Box(Lazy):
    """A part of a tensor that is opened only when it is read, since there may be hundreds of
    thousands."""

    path: Path
    offset: int
    length: int

    def load(self) -> Tensor:
        found = read_torch_file(self.path, self.offset, self.length)
        if not isinstance(found, Stored) or (found.shape, found.dtype) != (self.shape, self.dtype):
            is_tensor = isinstance(found, Stored)
            holds = f"{list(found.shape)} of {found.dtype}" if is_tensor else type(found).__name__
            raise CheckpointError(
                f"{self.path} holds {holds} at byte {self.offset}, but {METADATA} says that it is "
                f"{list(self.shape)} of {self.dtype}"
            )
        return found.load()


def _read_metadata(path: Path) -> StandIn:
    file = path / METADATA
    if file.stat().st_size > MAX_METADATA_BYTES:
        raise CheckpointError(f"{file} is too large to be the metadata of a checkpoint")
    metadata = load_pickle(file.read_bytes(), str(file), SAFE_GLOBALS)
    if not isinstance(metadata, StandIn) or not metadata.kind.endswith(".Metadata"):
        raise CheckpointError(f"{file} is not the metadata of a DCP checkpoint")
    return metadata


def _tensor(path: Path, name: str, entry: StandIn, places: dict[Any, Any]) -> Lazy:
    shape = _shape(entry.get("size"))
    dtype = entry.get("properties").state[0]
    if shape is None or not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{path / METADATA}: {name} has no shape or dtype")
    tiles: list[tuple[Shape, Lazy]] = []
    for chunk in entry.get("chunks"):
        corner, size = _shape(chunk.get("offsets")), _shape(chunk.get("sizes"))
        if corner is None or size is None or not len(corner) == len(size) == len(shape):
            raise CheckpointError(
                f"{path / METADATA}: a part of {name} has a different number of dims"
            )
        if any(start + count > n for start, count, n in zip(corner, size, shape, strict=True)):
            raise CheckpointError(f"{path / METADATA}: a part of {name} lies outside the tensor")
        info = places.get((name, corner))
        if 0 in size:  # ranks beyond the last row write empty boxes
            continue
        if info is None:
            raise CheckpointError(f"{path / METADATA} does not say where {name} {corner} is stored")
        tile = _Box(size, dtype, *_place(path, info))
        if tile.nbytes > tile.length:
            raise CheckpointError(f"{path / METADATA}: {name} claims more bytes than are stored")
        tiles.append((corner, tile))
    if not is_tiled_by(shape, [(corner, part.shape) for corner, part in tiles]):
        raise CheckpointError(f"{path / METADATA}: parts of {name} are missing or overlap")
    return Tiled(shape, dtype, tiles)


def _shape(value: Any) -> Shape | None:
    is_shape = isinstance(value, tuple) and len(value) <= MAX_DIMS
    return value if is_shape and all(type(n) is int and 0 <= n < 2**63 for n in value) else None


def _model_prefix(names: set[str]) -> str:
    """Returns the prefix of a model's names: `model.` if saved as {"model": …}, or none."""
    inner = {"model.embed_tokens.weight", "lm_head.weight", "tok_embeddings.weight"}
    return "" if inner & names else MODEL


# What the optimizer, scheduler and so on begin with, which without a prefix are mixed with the
# model's names.
_OTHERS = ("optimizer.", "optim.", "lr_scheduler", "train_state", "dataloader", "rng", "scaler.")
_STATE = re.compile(r"(?:optimizer|optim)\.(?:state\.)?(.+)\.(\w+)")


def _states(
    tensors: dict[str, Lazy], objects: dict[str, Any], weights: Container[str]
) -> tuple[dict[tuple[str, str], Lazy], list[float], dict[str, Lazy]]:
    """Returns the optimizer state of each parameter, its step counts, and everything else."""
    states: dict[tuple[str, str], Lazy] = {}
    steps: list[float] = []
    rest: dict[str, Lazy] = {}
    for name, lazy in tensors.items():
        match = _STATE.fullmatch(name)
        if name == "optimizer.num_updates" or (match and match[2] == "step" and lazy.numel == 1):
            steps.append(float(lazy.load().item()))
        elif match and (match[2] in MOMENTS or match[1] in weights):
            states[match[1], match[2]] = lazy
        else:
            rest[name] = lazy
    for name, value in objects.items():
        if (match := _STATE.fullmatch(name)) and match[2] == "step":
            steps.append(float(scalar(value)))
    return states, steps, rest


def _extras(path: Path, tensors: dict[str, Lazy], objects: dict[str, Any]) -> dict[str, Any]:
    extras: dict[str, Any] = {"objects": objects}
    if groups := list(_param_groups(objects)):
        extras["param_groups"] = groups
    for name, keys in PROGRESS.items():
        for key in keys:
            value = objects.get(key, tensors.get(key))
            if isinstance(value, Lazy):
                value = value.load().item() if value.numel == 1 else None
            if isinstance(value, (int, float)):
                extras[name] = int(value)
                break
    if isinstance(text := objects.get(RUN), str):
        extras["run"] = read_object(path / RUN, CheckpointError, text=text.encode())
    return extras


def _param_groups(objects: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields parameter groups, from either form: `param_groups.0.lr` with `.params`, or flattened
    with one lr per parameter."""
    settings: dict[str, dict[str, Any]] = {}
    for name, value in objects.items():
        match = re.fullmatch(r"(?:optimizer|optim)\.param_groups\.(.+)\.(\w+)", name)
        if match:
            settings.setdefault(match[1], {})[match[2]] = scalar(value)
    together: dict[str, dict[str, Any]] = {}
    for owner, values in settings.items():
        names = values.pop("params", [owner])
        names = [str(one) for one in names] if isinstance(names, list) else [owner]
        # Groups can only be recognized by the settings that their parameters share.
        key = owner if owner.isdigit() else repr(sorted(values.items(), key=str))
        together.setdefault(key, {**values, "names": []})["names"] += names
    yield from together.values()


def write_dcp(source: LazyCheckpoint, folder: Path, options: Options) -> None:
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors, objects = _entries(source, options)
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    by_name = {".".join(key): lazy for key, lazy in tensors.items()}
    for number, shard in enumerate(split_by_size(by_name, options.max_shard_bytes)):
        name = f"__0_{number}.distcp"
        with new_file(folder / name) as file:
            for key, value in objects.items() if number == 0 else ():
                flat = ".".join(key)
                described[flat] = BytesStorageMetadata()
                start = file.tell()
                length = write_torch_file(file, value)
                places[MetadataIndex(flat)] = _StorageInfo(name, start, length)
            for flat, lazy in shard.items():
                start = file.tell()
                length = write_torch_file(file, lazy)
                origin, size = torch.Size([0] * len(lazy.shape)), torch.Size(lazy.shape)
                chunk = ChunkStorageMetadata(origin, size)
                properties = TensorProperties(dtype=lazy.dtype)
                described[flat] = TensorStorageMetadata(properties, size, [chunk])
                places[MetadataIndex(flat, origin)] = _StorageInfo(name, start, length)
    metadata = Metadata(
        described,
        planner_data={".".join(key): key for key in (*tensors, *objects)},
        storage_data=places,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )
    with new_file(folder / METADATA) as file:
        pickle.dump(metadata, file)
    write_companions(source, folder)


def _entries(source: LazyCheckpoint, options: Options) -> tuple[dict[Key, Lazy], dict[Key, Any]]:
    """Returns tensors and objects under the keys that torch gives {"model": …, "optimizer": …}:
    `optimizer.state.<name>.exp_avg`, with a step for each parameter. The state of other optimizers
    keeps its own names."""
    tensors, groups = source.tensors, source.extras.get("param_groups", [])
    is_titan = options.names == "torchtitan"
    if is_titan:
        head_dim = head_dim_of(source.config, "writing torchtitan's names")
        check_is_plain_llama(source.config or {}, "a checkpoint with torchtitan's names")
        tensors = to_meta_names(tensors, head_dim)
        groups = [g | {"names": [meta_name(name) for name in g["names"]]} for g in groups]
    prefix = options.key_prefix if options.key_prefix is not None else "" if is_titan else MODEL
    outer: Key = (prefix.rstrip("."),) if prefix else ()
    updates = source.tensors.get(NUM_UPDATES)
    steps = updates.load() if updates is not None else torch.zeros(())
    found: dict[Key, Lazy] = {}
    for name, lazy in tensors.items():
        if (state := split_state(name, tensors)) is not None:
            parameter, kind = state
            found["optimizer", "state", parameter, kind] = lazy
            found["optimizer", "state", parameter, "step"] = held(steps)
        elif name.startswith(MODEL):
            found[*outer, name.removeprefix(MODEL)] = lazy
        elif name != NUM_UPDATES:
            found[name,] = lazy
    objects: dict[Key, Any] = {}
    for name in PROGRESS if "step" in source.extras else ():
        if name in source.extras:
            objects[tuple(PROGRESS[name][0].split("."))] = int(source.extras[name])
    if run := source.extras.get("run"):
        objects[RUN,] = json.dumps(run)
    if any(key[0] == "optimizer" for key in found):
        for group in groups:
            for parameter in group["names"]:
                for setting, value in group.items():
                    if setting != "names" and _is_plain(value):
                        objects["optimizer", "param_groups", parameter, setting] = value
    return found, objects


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
