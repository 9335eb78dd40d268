"""Reads and writes PEFT's LoRA adapters (`adapter_model.safetensors`) and tensor names;
adapter_config.json is read in `apps/dialects/peft.py` and made in `overland.py`.

Our names of an adapter's tensors are PEFT's without the prefix `base_model.model.`. In the state of
a model wrapped by PEFT, as DeepSpeed saves it, there is more to strip: `base_layer`, the adapter's
own name, and `modules_to_save` with its untrained copy.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overland.apps.convert.formats.lazy import (
    Config,
    LazyCheckpoint,
    Options,
    config_near,
    copy_files,
)
from overland.apps.convert.formats.safetensors import (
    read_weights,
    write_checksums,
    write_safetensors,
)
from overland.apps.dialects.peft import ADAPTER_CONFIG, read_adapter_config, settings_of
from overland.checkpoint.lazy import MODEL, Lazy
from overland.config.schema import Lora
from overland.data.tokenizer_files import refuse_link_out
from overland.errors import CheckpointError
from overland.files import new_file
from overland.models.config import EMBEDDING, HEAD
from overland.models.lora_targets import is_adapter, is_saved_whole, is_target, rank_and_alpha

WEIGHTS, OLD_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."

# The end of a name, how PEFT's own files have it, and which group is the adapter's name.
_ENDS = [
    (re.compile(r"\.lora_([AB])(?:\.([^.]+))?\.weight$"), r".lora_\1.weight", 2),
    (re.compile(r"\.lora_embedding_([AB])(?:\.([^.]+))?$"), r".lora_embedding_\1", 2),
    (
        re.compile(r"\.lora_magnitude_vector(?:\.(?!weight$)([^.]+))?(?:\.weight)?$"),
        ".lora_magnitude_vector",
        1,
    ),
]
_SAVED = re.compile(r"\.modules_to_save\.([^.]+)\.")


@dataclass(frozen=True)
class Adapter:
    """What is added to one matrix W: scale · B · A, or its transpose for an embedding table. With
    `lengths`, the rows of the sum are scaled to these norms (DoRA)."""

    a: Lazy
    b: Lazy
    scale: float
    lengths: Lazy | None = None
    is_table: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix that it belongs to."""
        shape = self.b.shape[0], self.a.shape[1]
        return shape[::-1] if self.is_table else shape


def detect_peft(path: Path) -> bool:
    return (path / ADAPTER_CONFIG).is_file()


def open_peft(path: Path, config: Config = None) -> LazyCheckpoint:
    contents = read_adapter_config(path)
    settings = settings_of(contents, path / ADAPTER_CONFIG)
    file = path / WEIGHTS if (path / WEIGHTS).is_file() else path / OLD_WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{path} has an {ADAPTER_CONFIG}, but no {WEIGHTS}")
    refuse_link_out(file)
    found = read_weights(file)
    strange = next((name for name in found if not name.startswith(PREFIX)), None)
    if strange is not None:
        raise CheckpointError(f"{file} has {strange!r:.100}, which does not begin with {PREFIX}")
    tensors = plain_names(found, file)
    adapted = adapters_in(tensors, settings, file)
    _check_others(tensors, {*adapted, EMBEDDING, HEAD}, settings, file)
    return LazyCheckpoint(
        "peft",
        path,
        {MODEL + name: lazy for name, lazy in tensors.items()},
        config=config or config_near(path),
        adapter=contents,
    )


def write_peft(source: LazyCheckpoint, folder: Path, options: Options) -> None:
    """Writes the adapters and the modules that are trained in full, and nothing else."""
    tensors = trained(source)
    contents = dict(require_adapter(source))
    saved = contents.get("modules_to_save") or []
    tied = (source.config or {}).get("tie_word_embeddings")
    if tied and EMBEDDING in tensors and HEAD not in tensors:
        # Here it is one matrix; PEFT would use the untrained one as its output.
        tensors[HEAD] = tensors[EMBEDDING]
        contents["modules_to_save"] = [*saved, HEAD.removesuffix(".weight")]
    named = {PREFIX + name: tensors[name] for name in sorted(tensors)}
    write_checksums(folder, write_safetensors(folder / WEIGHTS, named))
    with new_file(folder / ADAPTER_CONFIG) as file:
        file.write(json.dumps(contents, indent=2, sort_keys=True).encode())
    copy_files(source.companions, folder)


def require_adapter(source: LazyCheckpoint) -> dict[str, Any]:
    """Returns the adapter_config.json of a source; raises if it has no adapters."""
    if source.adapter is None and has_adapters(source.weights()):
        raise CheckpointError(
            f"{source.folder} has adapters, but no {ADAPTER_CONFIG} with their rank and alpha: put "
            "it there"
        )
    if source.adapter is None:
        raise CheckpointError(f"{source.folder} has no adapters")
    return source.adapter


def trained(source: LazyCheckpoint) -> dict[str, Lazy]:
    """Returns a source's adapters and the modules that are trained in full, by their plain names;
    also embeddings with rows for new tokens, which the base model does not have."""
    settings = settings_of(require_adapter(source), source.folder)
    run = (source.extras.get("run") or {}).get("config") or {}
    grown = (EMBEDDING, HEAD) if (run.get("sft") or {}).get("new_tokens") else ()
    found = {
        name: lazy
        for name, lazy in source.weights().items()
        if is_adapter(name) or is_saved_whole(name, settings) or name in grown
    }
    adapters_in(found, settings, source.folder)
    return found


def _check_others(
    tensors: Mapping[str, Lazy], known: Collection[str], settings: Lora, where: Path
) -> None:
    """Checks the tensors of a file that are not adapters. Besides saved modules, PEFT stores
    embeddings that have adapters or were resized."""
    others = [name for name in tensors if not is_adapter(name)]
    for name in others:
        if name not in known and not is_saved_whole(name, settings):
            raise CheckpointError(
                f"{where} has {name!r:.100}, which is neither an adapter nor in modules_to_save"
            )
    for module in settings.modules_to_save:
        if not any(f"{module}." in name for name in others):
            raise CheckpointError(f"{where} lacks {module!s:.100}, one of its modules_to_save")


def has_adapters(names: Iterable[str]) -> bool:
    return any(map(is_adapter, names))


def plain_names(tensors: Mapping[str, Lazy], where: Path) -> dict[str, Lazy]:
    """Returns the tensors of a model wrapped by PEFT, or of one of its files, by our names."""
    plain: dict[str, Lazy] = {}
    adapters: set[str] = set()
    for name, lazy in tensors.items():
        if ".original_module." in name:  # before it was trained
            continue
        short, adapter = plain_name(name)
        adapters.add(adapter)
        if short in plain:
            raise CheckpointError(f"{where} has {short!r:.100} twice, under two names")
        plain[short] = lazy
    adapters.discard("")
    if len(adapters) > 1:
        names = ", ".join(sorted(adapters))
        raise CheckpointError(
            f"{where} has several adapters ({names:.200}), but only one can be read"
        )
    return plain


def plain_name(name: str) -> tuple[str, str]:
    """Returns our name of a tensor of a model wrapped by PEFT, and the name of its adapter."""
    short, adapter = name.removeprefix(PREFIX).replace(".base_layer.", "."), ""
    if saved := _SAVED.search(short):
        return _SAVED.sub(".", short), saved[1]
    for pattern, end, group in _ENDS:
        if found := pattern.search(short):
            short, adapter = pattern.sub(end, short), found[group] or ""
    return short, adapter


def adapters_in(tensors: Mapping[str, Lazy], settings: Lora, where: Path) -> dict[str, Adapter]:
    """Returns the adapters among the tensors, by the name of their weight; raises if they are
    inconsistent."""
    found: dict[str, dict[str, Lazy]] = {}
    for name, lazy in tensors.items():
        module, is_part, part = name.partition(".lora_")
        if is_part:
            found.setdefault(module, {})[part] = lazy
    if not found:
        raise CheckpointError(f"{where} has no adapters")
    for module in found:
        if not is_target(module, settings):
            raise CheckpointError(
                f"{where} has an adapter for {module!s:.100}, which {ADAPTER_CONFIG} does not name "
                "(target_modules, exclude_modules, layers_to_transform, modules_to_save)"
            )
    return {f"{module}.weight": _adapter(module, parts, settings, where)
            for module, parts in found.items()}  # fmt: skip


def _adapter(module: str, parts: dict[str, Lazy], settings: Lora, where: Path) -> Adapter:
    is_table = "embedding_A" in parts or "embedding_B" in parts
    names = ["embedding_A", "embedding_B"] if is_table else ["A.weight", "B.weight"]
    with_lengths = settings.dora and not is_table
    names += ["magnitude_vector"] if with_lengths else []
    for part in names:
        if part not in parts:
            raise CheckpointError(f"{where} lacks {module!s:.100}.lora_{part}")
    for part in parts:
        if part not in names:
            reason = "DoRA of embeddings is not supported" if is_table else "this is not supported"
            raise CheckpointError(f"{where} has {module!s:.100}.lora_{part!s:.50}: {reason}")
    a, b, *lengths = (parts[part] for part in names)
    rank, alpha = rank_and_alpha(module, settings)
    shapes = [(rank, a.numel // rank), (b.numel // rank, rank), b.shape[:1]]
    for part, shape in zip(names, shapes, strict=False):
        lazy, what = parts[part], f"{where}: {module!s:.100}.lora_{part}"
        if lazy.shape != shape:
            raise CheckpointError(
                f"{what} has shape {list(lazy.shape)}, which does not fit the other parts and the "
                f"rank, {rank} in {ADAPTER_CONFIG}; adapters of convolutions are not supported"
            )
        if not lazy.dtype.is_floating_point:
            raise CheckpointError(f"{what} has dtype {lazy.dtype}")
    scale = alpha / (math.sqrt(rank) if settings.rslora else rank)
    return Adapter(a, b, scale, lengths[0] if lengths else None, is_table)
