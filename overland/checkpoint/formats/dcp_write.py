"""Plain torch.distributed.checkpoint folders, written: what `dcp.load` of stock torch reads.

torch's own writer keeps every tensor until the end, so the files are made here, tensor by tensor.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from overland.checkpoint.formats import llama
from overland.checkpoint.formats.dcp import METADATA
from overland.checkpoint.formats.lazy import Lazy, held
from overland.checkpoint.formats.options import Options
from overland.checkpoint.formats.shards import describe, split
from overland.checkpoint.formats.source import MODEL, NUM_UPDATES, Source, split_state
from overland.checkpoint.formats.torch_writer import write_torch_file
from overland.files import new_file

Key = tuple[str, ...]
"""Where an entry stands in the nested state dict; its flat name is the same with dots."""


def write_dcp(source: Source, folder: Path, options: Options) -> None:
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
    for number, shard in enumerate(split(by_name, options.max_shard_bytes)):
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
    describe(source.config, source.companions, folder)


def _entries(source: Source, options: Options) -> tuple[dict[Key, Lazy], dict[Key, Any]]:
    """Tensors and objects under the keys that {"model": …, "optimizer": …} gets from torch:
    `optimizer.state.<name>.exp_avg`, with a step for each parameter. Other optimizers' state keeps
    its own names."""
    tensors, groups = source.tensors, source.extras.get("param_groups", [])
    is_titan = options.names == "torchtitan"
    if is_titan:
        head_dim = llama.head_dim_of(source.config, "writing torchtitan's names")
        llama.check_is_plain_llama(source.config or {}, "a checkpoint with torchtitan's names")
        tensors = llama.in_meta_words(tensors, head_dim)
        groups = [g | {"names": [llama.meta_name(name) for name in g["names"]]} for g in groups]
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
    if "step" in source.extras:
        objects["train_state", "step"] = int(source.extras["step"])
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
