"""Weights in Hugging Face's layout: safetensors files, an index if there are several, config.json.

Both directions stream: reading takes from the file only the slice that lives here, one tensor at a
time; writing holds one shard. A folder appears complete or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from overland.models.errors import ModelError
from overland.models.init import LocalPart, plain_name, whole
from overland.models.parameters import EMBEDDING, HEAD

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DEFAULT_SHARD_BYTES = 5 * 1000**3


def load_hf(
    model: nn.Module, folder: str | Path, local_part: LocalPart = whole, strict: bool = True
) -> None:
    """Fill the model's parameters from a folder of safetensors, cast to the parameters' types.

    The model may be a part of the whole (a pipeline stage, shards through `local_part`). A tensor
    that is missing or has another shape is always an error; `strict` also refuses tensors in the
    files that no part of `model.config` asks for.
    """
    folder = Path(folder)
    file_of = _files_by_tensor(folder)
    config: Any = model.config
    tied = bool(getattr(config, "tie_word_embeddings", False))
    wanted = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    source = {name: _source(name, file_of, tied) for name in wanted}

    missing = [name for name in wanted if source[name] not in file_of]
    if missing:
        raise ModelError(f"{folder} lacks {_list(missing)}, which this model needs")
    if strict:
        known = {*config.parameter_shapes(), *source.values(), *({HEAD} if tied else ())}
        unexpected = [n for n in file_of if n not in known and not n.endswith("inv_freq")]
        if unexpected:
            raise ModelError(f"{folder} has {_list(unexpected)}, which this model does not have")

    for file in dict.fromkeys(file_of[source[name]] for name in wanted):
        names = [name for name in wanted if file_of[source[name]] == file]
        with _open(folder / file) as tensors, torch.no_grad():
            for name in names:
                _read(tensors, source[name], wanted[name], local_part, folder / file)


def save_hf(
    folder: str | Path,
    config: Any,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write (name, full tensor) pairs as they come, then config.json, then give the folder its
    name. A tied lm_head is left out, as transformers does. The folder must be new or empty."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} already exists; choose a new folder or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        dtypes = _write_shards(partial, config, tensors, dtype, max_shard_bytes)
        contents = config.to_hf()
        if len(dtypes) == 1:  # transformers 4 and 5 both read this key
            contents["torch_dtype"] = str(dtypes.pop()).removeprefix("torch.")
        _write_json(partial / "config.json", contents)
        _sync(partial)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _files_by_tensor(folder: Path) -> dict[str, str]:
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
        absent = sorted({f for f in weight_map.values() if not (folder / f).is_file()})
        if absent:
            raise ModelError(f"{folder} lacks {_list(absent)}, which its index names")
        return weight_map
    if (folder / SINGLE).is_file():
        with _open(folder / SINGLE) as tensors:
            return dict.fromkeys(tensors.keys(), SINGLE)
    hint = ""
    if folder.is_dir() and any(folder.glob("pytorch_model*.bin")):
        hint = " (pytorch_model.bin can run code when loaded: convert it to safetensors first)"
    raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")


def _source(name: str, file_of: dict[str, str], tied: bool) -> str:
    """The tensor in the files that holds this parameter; of a tied pair either may be there."""
    if tied and name in (EMBEDDING, HEAD):
        return next((n for n in (EMBEDDING, HEAD) if n in file_of), name)
    return name


def _read(
    tensors: Any, source: str, parameter: nn.Parameter, local_part: LocalPart, file: Path
) -> None:
    target, offsets, full_shape = local_part(parameter)
    try:
        stored = tensors.get_slice(source)
    except SafetensorError as error:
        raise ModelError(f"{file} does not hold {source}, though its index says so") from error
    shape = tuple(stored.get_shape())
    if shape != tuple(full_shape):
        raise ModelError(
            f"{source} in {file} has shape {list(shape)}, but the model expects {list(full_shape)}"
        )
    if target.numel() == 0:
        return
    if target.is_meta:
        raise ModelError(f"{source} is on the meta device; call to_empty() before loading")
    # safetensors cannot slice a scalar, and no model here has one.
    ends = (offset + size for offset, size in zip(offsets, target.shape, strict=True))
    target.copy_(stored[tuple(slice(a, b) for a, b in zip(offsets, ends, strict=True))])


def _write_shards(
    folder: Path,
    config: Any,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> set[torch.dtype]:
    """Shards under provisional names first: how many there are shows only at the end."""
    shards: list[list[str]] = []
    dtypes: set[torch.dtype] = set()
    total = 0
    for shard in _shards(_checked(config, tensors), dtype, max_shard_bytes):
        save_file(shard, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(shard))
        dtypes |= {tensor.dtype for tensor in shard.values()}
        total += sum(tensor.nbytes for tensor in shard.values())

    count = len(shards)
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if count == 1:
        files = [SINGLE]
    for i, file in enumerate(files):
        (folder / f"{i}.part").rename(folder / file)
        _sync(folder / file)
    if count > 1:
        weight_map = {
            name: file for file, names in zip(files, shards, strict=True) for name in names
        }
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return dtypes


def _checked(config: Any, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The pairs as they come, each expected, in its shape, once; at the end none is missing."""
    missing: dict[str, tuple[int, ...]] = dict(config.parameter_shapes())
    tied = bool(getattr(config, "tie_word_embeddings", False))
    for wrapped_name, tensor in tensors:
        name = plain_name(wrapped_name)
        if name == HEAD and tied:
            continue
        shape = missing.pop(name, None)
        if shape is None:
            raise ModelError(f"{name} is not a parameter of this model, or came twice")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
        yield name, tensor
    if missing:
        raise ModelError(f"the weights to save lack {_list(list(missing))}")


def _shards(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, max_shard_bytes: int
) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        tensor = tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # a view: safetensors would refuse its larger storage
        if shard and size + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        tensors = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {path} as safetensors: {error}") from error
    with tensors:
        yield tensors


def _write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
