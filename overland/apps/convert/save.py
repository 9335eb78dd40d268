"""`save_model`: writes a model in memory as a Hugging Face folder or a safetensors file, complete
or not at all.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from overland.apps.convert.convert import new_target
from overland.apps.convert.formats import FORMATS
from overland.apps.convert.formats.lazy import (
    LazyCheckpoint,
    Options,
    cast_lazily,
    given_dtype,
    held,
)
from overland.apps.evaluation.model import OpenModel
from overland.arguments import path_of, refused
from overland.checkpoint.lazy import MODEL, Lazy
from overland.data.tokenizer import Tokenizer
from overland.data.tokenizer_files import companions_in
from overland.errors import CheckpointError
from overland.models.init import persistent_buffers, plain_name
from overland.models.registry import lacks_hf_form
from overland.words import did_you_mean

TARGETS = ("hf", "safetensors")


def save_model(
    model: OpenModel | torch.nn.Module,
    target: str | Path,
    *,
    to: str = "hf",
    dtype: str | torch.dtype | None = None,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Writes the weights of a model in memory; the target is complete or does not exist.

    Args:
        model: What `overland.load_model` returned, or a module of a registered model.
        target: New folder; with `to="safetensors"` a new file.
        to: `hf`, with config.json and tokenizer, as `transformers` reads it; or `safetensors`.
        dtype: Type of the weights: float32, bfloat16 or float16, or torch's; default: unchanged.
        tokenizer: Written next to the weights; default: the tokenizer of an opened model.
    """
    if to not in TARGETS:
        raise CheckpointError(f"to = {to!r} is unknown{did_you_mean(to, TARGETS)}")
    kind = given_dtype(dtype)
    module = model.model if isinstance(model, OpenModel) else model
    if not isinstance(module, torch.nn.Module):
        raise refused("model", model, "what overland.load_model returned, or a module")
    tokenizer = tokenizer or (model.tokenizer if isinstance(model, OpenModel) else None)
    target, format_ = path_of(target, "target"), FORMATS[to]
    if format_.is_file and target.suffix != ".safetensors":
        raise CheckpointError(f"to = {to!r} writes one file: name it {target.name}.safetensors")
    tensors = _tensors(module, kind)
    with tempfile.TemporaryDirectory(prefix="overland-") as place:
        if tokenizer:  # a model may have been opened without one
            for name, data in tokenizer.files().items():
                (Path(place) / name).write_bytes(data)
        source = LazyCheckpoint(
            "memory", target, tensors, config=_config(module), companions=companions_in(Path(place))
        )
        with new_target(target, format_.is_file) as beside:
            assert format_.write is not None
            format_.write(source, beside, Options())
    return target


def _tensors(module: torch.nn.Module, dtype: torch.dtype | None) -> dict[str, Lazy]:
    state: dict[str, torch.Tensor] = {plain_name(n): one for n, one in module.named_parameters()}
    state.update(persistent_buffers(module))
    found: dict[str, Lazy] = {}
    for name, tensor in state.items():
        if tensor.is_meta:
            raise CheckpointError(f"{name} is on the meta device and has no values: load it first")
        lazy = held(tensor.detach().cpu())
        is_cast = dtype is not None and tensor.is_floating_point()
        found[MODEL + name] = cast_lazily(lazy, dtype) if is_cast and dtype else lazy
    return found


def _config(module: torch.nn.Module) -> dict[str, Any]:
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "to_hf") or lacks_hf_form(config):
        raise CheckpointError(
            f"{type(module).__name__} has no config with its own to_hf(), which describes the "
            "model (docs/extending.md)"
        )
    return config.to_hf()
