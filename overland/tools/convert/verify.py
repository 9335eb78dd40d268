"""After writing: the target is opened as any source would be, and must give what was sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from overland.checkpoint.formats.checkpoint import MODEL, LazyCheckpoint
from overland.checkpoint.formats.lazy import digest
from overland.errors import CheckpointError
from overland.models.flops import sample_fields
from overland.models.hf import shapes_in_files
from overland.models.init import init_buffers
from overland.models.registry import build_model, read_hf_config
from overland.models.sizes import EMBEDDING, HEAD

# 1.5 GB of weights in float32, twice.
MAX_LOGITS_PARAMETERS = 400_000_000
TOLERANCE = 1e-4

_AGAIN = "the target was removed, try again"

Sent = Mapping[str, tuple[tuple[int, ...], torch.dtype, str]]
"""Name → shape, type and digest of what the writer was given."""


def verify_hashes(written: LazyCheckpoint, sent: Sent, done: Callable[[int], None]) -> None:
    """Compares every tensor that was sent."""
    for name, (shape, dtype, wanted) in sent.items():
        lazy = written.tensors.get(name)
        if lazy is None and name == MODEL + HEAD:  # left out where it is the embedding
            lazy = written.tensors.get(MODEL + EMBEDDING)
        if lazy is None:
            raise CheckpointError(f"{name} was sent but is not in what was written; {_AGAIN}")
        if lazy.shape != shape or lazy.dtype != dtype or digest(lazy.load()) != wanted:
            raise CheckpointError(f"{name} was written, but reads as something else; {_AGAIN}")
        done(lazy.nbytes)


def verify_logits(source: LazyCheckpoint, written: LazyCheckpoint) -> float | None:
    """The largest difference of logits between the two, on fixed tokens, in float32 (of a model of
    arrays: of the loss, on fixed noise); None for a user's own model, which is not known here."""
    if source.own_model:
        return None
    if source.config is None:
        raise CheckpointError(
            f"{source.folder} does not say what model it holds, so there are no logits to compare; "
            "name its config.json with --config"
        )
    config = read_hf_config(source.config)
    count = sum(torch.Size(shape).numel() for shape in shapes_in_files(config)[0].values())
    if count > MAX_LOGITS_PARAMETERS:
        raise CheckpointError(
            f"logits are compared for models of up to {MAX_LOGITS_PARAMETERS:,} parameters, and "
            f"this one has {count:,}; use --verify hash"
        )
    generator = torch.Generator().manual_seed(0)
    fields = sample_fields(config)
    if fields is None:
        inputs = {"tokens_BS": torch.randint(config.vocab_size, (2, 32), generator=generator)}
    else:
        inputs = {
            name: torch.randn(2, *shape, generator=generator).to(getattr(torch, dtype))
            for name, (dtype, shape) in fields.items()
        }
    with torch.no_grad():
        before = model_with_weights(source, config)(**inputs)
        after = model_with_weights(written, config)(**inputs)
    difference = float((before - after).abs().max())
    if not difference <= TOLERANCE:
        raise CheckpointError(
            f"logits of what was written differ by {difference:.2g} from the source's; {_AGAIN}"
        )
    return difference


def model_with_weights(source: LazyCheckpoint, config: Any) -> nn.Module:
    """Overland's own model with the source's weights, in float32."""
    model = build_model(config)
    init_buffers(model, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if MODEL + name not in source.tensors:
                raise CheckpointError(f"{name} is not there, so there are no logits to compare")
            parameter.copy_(source.read(MODEL + name))
    return model.eval()
