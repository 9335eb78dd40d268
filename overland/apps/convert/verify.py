"""Verifies a conversion: opens the target like any source, and compares hashes, merged matrices and
logits with what was written, within the tolerances set here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from overland.apps.convert.formats.lazy import Config, LazyCheckpoint, digest
from overland.apps.convert.formats.merge import Merged, compare
from overland.apps.dialects.peft import settings_of
from overland.checkpoint.lazy import MODEL
from overland.errors import CheckpointError, ModelError
from overland.models.config import EMBEDDING, HEAD
from overland.models.flops import count_parameters, sample_fields
from overland.models.init import init_buffers
from overland.models.lora import LoRA
from overland.models.registry import build_model, read_hf_config
from overland.models.transform import apply_transforms

# 1.5 GB of weights in float32, twice.
MAX_LOGITS_PARAMETERS = 400_000_000
TOLERANCE = 1e-4
PRODUCTS = 32  # rounding errors of the largest result, in the dtype that is written
ROUNDED = 16  # the same for logits, after all layers

_AGAIN = "the target was removed, try again"

Sent = Mapping[str, tuple[tuple[int, ...], torch.dtype, str]]
"""Name → shape, dtype and digest of what the writer received."""


def verify_hashes(written: LazyCheckpoint, sent: Sent, done: Callable[[int], None]) -> None:
    """Compares every tensor that was written with the one that was sent."""
    for name, (shape, dtype, wanted) in sent.items():
        lazy = written.tensors.get(name)
        if lazy is None and name == MODEL + HEAD:  # omitted if tied to the embedding
            lazy = written.tensors.get(MODEL + EMBEDDING)
        if lazy is None:
            raise CheckpointError(f"the output is missing {name}; {_AGAIN}")
        if lazy.shape != shape or lazy.dtype != dtype or digest(lazy.load()) != wanted:
            raise CheckpointError(f"{name} reads back differently than written; {_AGAIN}")
        done(lazy.nbytes)


def verify_products(source: LazyCheckpoint, written: LazyCheckpoint) -> float:
    """Compares every merged matrix with its weights and adapter; returns the largest difference,
    relative to the results."""
    largest = 0.0
    for name, lazy in source.tensors.items():
        if not isinstance(lazy, Merged):
            continue
        difference = compare(lazy, written.read(name))
        limit = PRODUCTS * max(torch.finfo(lazy.dtype).eps, torch.finfo(torch.float32).eps)
        if not difference <= limit:
            raise CheckpointError(
                f"{name} was merged, but its results differ by {difference:.2g} from those of the "
                f"weights with their adapter; {_AGAIN}"
            )
        largest = max(largest, difference)
    return largest


def verify_logits(
    source: LazyCheckpoint,
    written: LazyCheckpoint,
    written_config: Config,
    is_asked: bool = True,
) -> tuple[float | None, str]:
    """Returns the largest difference between the logits of the two, on fixed tokens, in float32
    (for a model of arrays: between losses on fixed noise). A target in fewer bits must have the
    logits of the source's weights rounded to them. Returns None and the reason if they
    cannot be compared; size and a missing config are errors only if `is_asked`."""
    if source.own_model:
        return None, f"{source.own_model} is a custom model"
    try:
        if source.config is None or written_config is None:
            raise CheckpointError(
                f"{source.folder} does not specify its model, so there are no logits to compare; "
                "give its config.json with --config"
            )
        config = read_hf_config(source.config)
        count = count_parameters(config).total
        if count > MAX_LOGITS_PARAMETERS:
            raise CheckpointError(
                f"logits can be compared for models of up to {MAX_LOGITS_PARAMETERS:,} parameters, "
                f"but this one has {count:,}; use --verify hash"
            )
    except (CheckpointError, ModelError) as error:
        if is_asked:
            raise
        return None, str(error)
    inputs = _some_inputs(config)
    try:
        with torch.no_grad():
            before = model_with_weights(source, config)(**inputs)
            after = model_with_weights(written, read_hf_config(written_config))(**inputs)
            rounded = before
            if source.adapter is None:
                rounded = model_with_weights(source, config, written)(**inputs)
    except ModelError as error:  # adapters on a matrix that our LoRA does not support
        return None, str(error)
    difference = float((before - after).abs().max())
    dtype = next(iter(written.weights().values())).dtype
    limit = TOLERANCE
    if source.adapter is not None and dtype.itemsize < 4:  # rounded after merging, not before
        limit += ROUNDED * torch.finfo(dtype).eps * float(before.abs().max())
    if not float((rounded - after).abs().max()) <= limit:
        raise CheckpointError(
            f"the logits of the target differ by {difference:.2g} from the source's; {_AGAIN}"
        )
    return difference, ""


def _some_inputs(config: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    fields = sample_fields(config)
    if fields is None:
        return {"tokens_BS": torch.randint(config.vocab_size, (2, 32), generator=generator)}
    return {
        name: torch.randn(2, *shape, generator=generator).to(getattr(torch, dtype))
        for name, (dtype, shape) in fields.items()
    }


def model_with_weights(
    source: LazyCheckpoint, config: Any, rounded_as: LazyCheckpoint | None = None
) -> nn.Module:
    """Returns Overland's own model with the source's weights and adapters, in float32, each rounded
    to the dtype that it has in `rounded_as`."""
    model = build_model(config)
    if source.adapter is not None:
        settings = settings_of(source.adapter, source.folder)
        apply_transforms(model, [LoRA(settings.model_copy(update={"dropout": 0.0}))])
    init_buffers(model, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if MODEL + name not in source.tensors:
                raise CheckpointError(f"{name} is missing, so there are no logits to compare")
            tensor = source.read(MODEL + name)
            if rounded_as is not None and (other := rounded_as.tensors.get(MODEL + name)):
                tensor = tensor.to(other.dtype)
            parameter.copy_(tensor)
    return model.eval()
