"""Merges adapters (LoRA, DoRA) into their base weights, some rows at a time, in float32 or wider,
whatever the dtype of the weights; and applies the masks of sparse matrices.

Afterwards each merged matrix is compared with its two parts by applying both to random vectors
(`compare`), which needs no model and works for any size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from overland.apps.convert.formats.lazy import Changed, Config, LazyCheckpoint
from overland.apps.convert.formats.peft import Adapter, adapters_in, require_adapter, trained
from overland.apps.dialects.peft import settings_of
from overland.checkpoint.lazy import MODEL, Lazy
from overland.errors import CheckpointError
from overland.models.config import EMBEDDING, HEAD
from overland.models.lora_targets import ALL_LINEAR, is_adapter, is_target
from overland.models.sparse import MASK, masked

ROWS_ELEMENTS = 1 << 22  # 16 MiB in float32
SAMPLES = 4  # random vectors used to compare a matrix


@dataclass(frozen=True, eq=False)
class Merged(Lazy):
    """W + scale · B · A, with the row norms that DoRA has trained."""

    before: Lazy
    adapter: Adapter
    name: str

    def load(self) -> Tensor:
        weight_OD = self.before.load()
        out = torch.empty_like(weight_OD, dtype=self.dtype)
        parts = _Parts(self.adapter, weight_OD.dtype, self.name)
        for rows in _some_rows(self.shape):
            out[rows] = parts.added_to(weight_OD[rows], rows).to(self.dtype)
            if not bool(out[rows].isfinite().all()):
                raise CheckpointError(
                    f"{self.name} merged with its adapter, scaled by {self.adapter.scale:g} (from "
                    f"alpha and rank), holds values that are not finite in {self.dtype}"
                )
        return out


class _Parts:
    """An adapter in memory, in a dtype of sufficient precision."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype, name: str) -> None:
        loaded = [one.load() for one in (adapter.a, adapter.b, adapter.lengths) if one is not None]
        if not all(bool(tensor.isfinite().all()) for tensor in loaded):
            raise CheckpointError(f"the adapter of {name} holds values that are not finite")
        dtypes = (torch.float32, dtype, *(tensor.dtype for tensor in loaded))
        self.wide = reduce(torch.promote_types, dtypes)
        a, b, *lengths = (tensor.to(self.wide) for tensor in loaded)
        self.left_Or, self.right_rD = (a.t(), b.t()) if adapter.is_table else (b, a)
        self.lengths_O, self.scale = lengths[0] if lengths else None, adapter.scale

    def added_to(self, weight_OD: Tensor, rows: slice) -> Tensor:
        added = self.scale * (self.left_Or[rows] @ self.right_rD)
        whole = weight_OD.to(self.wide) + added
        if self.lengths_O is None:
            return whole
        return whole * (self.lengths_O[rows] / torch.linalg.vector_norm(whole, dim=1))[:, None]


def join(base: LazyCheckpoint, adapters: LazyCheckpoint) -> LazyCheckpoint:
    """Combines a model with adapters that are stored elsewhere."""
    require_adapter(adapters)
    weights, config = base.weights(), base.config
    added = adapters.weights() if adapters.format == "peft" else trained(adapters)
    for name, lazy in added.items():
        if is_adapter(name):
            continue
        if name == HEAD and EMBEDDING in weights:
            config = _untied(config)
            known = weights.get(HEAD, weights[EMBEDDING])
        elif name in weights:
            known = weights[name]
        else:
            raise CheckpointError(
                f"{adapters.folder} has {name}, which {base.folder} does not have: the adapters "
                "belong to another model"
            )
        if name in (EMBEDDING, HEAD) and known.shape[1:] == lazy.shape[1:] and config:
            config = {**config, "vocab_size": lazy.shape[0]}  # tokens may have been added
        elif known.shape != lazy.shape:
            raise CheckpointError(
                f"{adapters.folder} has {name} with shape {list(lazy.shape)}, but {base.folder} "
                f"has {list(known.shape)}: the adapters belong to another model"
            )
    if EMBEDDING in added and HEAD not in added and is_tied(config):  # PEFT trains a copy
        weights.setdefault(HEAD, weights[EMBEDDING])
        config = _untied(config)
    tensors = {MODEL + name: lazy for name, lazy in {**weights, **added}.items()}
    own = {file.name for file in adapters.companions}  # the tokenizer may have new tokens
    companions = [*adapters.companions, *(one for one in base.companions if one.name not in own)]
    return replace(
        base, tensors=tensors, config=config, companions=companions, adapter=adapters.adapter
    )


def merge(source: LazyCheckpoint, dtype: torch.dtype | None = None) -> LazyCheckpoint:
    """Merges adapters into the weights, in `dtype` or as they are stored, rounding only once."""
    contents = require_adapter(source)
    refuse_quantized(source)
    weights = source.weights()
    settings = settings_of(contents, source.folder)
    adapters = adapters_in(weights, settings, source.folder)
    merged = {name: lazy for name, lazy in weights.items() if not is_adapter(name)}
    config = source.config
    for name, lazy in merged.items():
        module = name.removesuffix(".weight")
        is_named = settings.targets != ALL_LINEAR and is_target(module, settings)
        if is_named and len(lazy.shape) == 2 and name not in adapters:
            raise CheckpointError(
                f"{source.folder} has no adapter for {module}, which target_modules names: some of "
                "the adapters are missing"
            )
    for name, adapter in adapters.items():
        before = merged.get(name)
        if before is None and name == HEAD and is_tied(config):
            before = merged.get(EMBEDDING)
        if before is None or before.shape != adapter.shape:
            has = "nothing of that name" if before is None else f"shape {list(before.shape)}"
            raise CheckpointError(
                f"the adapter of {name} is for a matrix of shape {list(adapter.shape)}, but the "
                f"model has {has}: the adapters belong to another model"
            )
        if name in (EMBEDDING, HEAD) and is_tied(config):  # no longer one shared matrix
            config = _untied(config)
            merged.setdefault(HEAD, merged[EMBEDDING])
        merged[name] = Merged(before.shape, dtype or before.dtype, before, adapter, name)
    tensors = {MODEL + name: lazy for name, lazy in merged.items()}
    extras = {name: value for name, value in source.extras.items() if name != "param_groups"}
    return replace(source, tensors=tensors, extras=extras, config=config, adapter=None)


def is_tied(config: Mapping[str, Any] | None) -> bool:
    return bool(config and config.get("tie_word_embeddings"))


def _untied(config: Config) -> Config:
    return {**config, "tie_word_embeddings": False} if config else config


def refuse_quantized(source: LazyCheckpoint) -> None:
    """Raises for weights in 4 or 8 bits."""
    bits = (source.config or {}).get("quantization_config")
    weights = source.weights()
    matrices = [name for name in weights if name.endswith(".weight")]
    narrow = next((name for name in matrices if weights[name].dtype.itemsize == 1), None)
    if bits or narrow:
        what = "has a quantization_config" if bits else f"has {narrow} quantized"
        raise CheckpointError(
            f"{source.folder} {what}, and rounding to so few bits would lose the adapter. Merge it "
            "into the original 16-bit weights instead: overland convert MODEL OUT --adapter DIR "
            "--merge-lora"
        )
    run = ((source.extras.get("run") or {}).get("config") or {}).get("lora") or {}
    if run.get("base") == "nf4" and source.format == "overland":
        raise CheckpointError(
            f"{source.folder} was trained on 4-bit weights (lora.base = nf4), and its adapters "
            "would compute something else on the full weights. If that is what you want, write "
            "them with --to peft, and then run: overland convert MODEL OUT --adapter DIR "
            "--merge-lora"
        )


def compare(merged: Merged, written: Tensor) -> float:
    """Returns the largest difference between a written matrix and its two parts, applied to random
    vectors, relative to the largest result."""
    generator = torch.Generator().manual_seed(0)
    x_Dn = torch.randn(merged.shape[1], SAMPLES, generator=generator)
    weight_OD, adapter = merged.before.load(), merged.adapter
    parts = _Parts(adapter, weight_OD.dtype, merged.name)
    x_Dn = x_Dn.to(parts.wide)
    low_rn = parts.right_rD @ x_Dn
    largest = difference = 0.0
    for rows in _some_rows(merged.shape):
        wide_OD = weight_OD[rows].to(parts.wide)
        wanted = wide_OD @ x_Dn + parts.scale * (parts.left_Or[rows] @ low_rn)
        if parts.lengths_O is not None:
            # |w + l·R|² without the sum: |w|² + 2 w·(l·R) + l·(R·Rᵀ)·lᵀ
            left = parts.scale * parts.left_Or[rows]
            inner = (wide_OD @ parts.right_rD.t() * left).sum(1)
            square = ((left @ (parts.right_rD @ parts.right_rD.t())) * left).sum(1)
            length = (wide_OD.square().sum(1) + 2 * inner + square).sqrt()
            wanted *= (parts.lengths_O[rows] / length)[:, None]
        found = written[rows].to(parts.wide) @ x_Dn
        largest = max(largest, float(wanted.abs().max()))
        difference = max(difference, float((found - wanted).abs().max()))
    return difference / largest if largest else difference


def _some_rows(shape: tuple[int, ...]) -> Iterator[slice]:
    step = max(1, ROWS_ELEMENTS // max(1, shape[1]))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def densify(source: LazyCheckpoint) -> LazyCheckpoint:
    """Returns the checkpoint with the masks of sparse matrices (models/sparse.py) applied."""
    if not any(name.endswith(f".{MASK}") for name in source.tensors):
        return source
    found = {name: lazy for name, lazy in source.tensors.items() if not name.endswith(f".{MASK}")}
    for name, mask in source.tensors.items():
        if not (name.startswith(MODEL) and name.endswith(f".{MASK}")):
            continue
        key = f"{name.removesuffix(MASK)}weight"
        weight = found.get(key)
        if weight is None or weight.shape[:1] != mask.shape[:1] or weight.shape[1] % mask.shape[1]:
            raise CheckpointError(f"{source.folder} has {name}, but no weight of matching shape")
        found[key] = Changed(weight.shape, weight.dtype, weight, partial(_masked, mask=mask))
    return source.with_tensors(found)


def _masked(weight_OD: Tensor, mask: Lazy) -> Tensor:
    return masked(weight_OD, mask.load(), weight_OD.shape[1] // mask.shape[1])
