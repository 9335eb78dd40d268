"""Reads and writes checkpoints of other programs and our own; `__init__.py` lists the formats by
name, and detects and opens the format of a path. See docs/convert.md.

A new format needs a module and a line here, or `register_format` in a module of your own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from overland.apps.convert.formats.dcp import detect_dcp, open_dcp, write_dcp
from overland.apps.convert.formats.deepspeed import detect_deepspeed, open_deepspeed
from overland.apps.convert.formats.hf import detect_hf, open_hf, write_hf
from overland.apps.convert.formats.lazy import Config, LazyCheckpoint, Options
from overland.apps.convert.formats.merge import densify
from overland.apps.convert.formats.meta import detect_meta, open_meta, write_meta
from overland.apps.convert.formats.overland import (
    complete,
    detect_overland,
    open_overland,
    write_overland,
)
from overland.apps.convert.formats.peft import detect_peft, open_peft, write_peft
from overland.apps.convert.formats.safetensors import detect_single, open_single, write_single
from overland.apps.convert.formats.torch import detect_torch, open_torch, write_torch
from overland.arguments import path_of
from overland.data.tokenizer_files import companions_in
from overland.errors import CheckpointError
from overland.files import NOT_AS_EXPECTED

__all__ = ["FORMATS", "Format", "LazyCheckpoint", "Options", "densify", "open_any", "open_peft",
           "register_format", "targets"]  # fmt: skip


@dataclass(frozen=True)
class Format:
    """`weights_only`: the format cannot store an optimizer. `is_file`: one file, not a folder."""

    detect: Callable[[Path], bool]
    open: Callable[[Path, Config], LazyCheckpoint]
    write: Callable[[LazyCheckpoint, Path, Options], None] | None = None
    weights_only: bool = False
    is_file: bool = False


# In the order in which they are tried.
FORMATS = {
    "overland": Format(detect_overland, open_overland, write_overland),
    "dcp": Format(detect_dcp, open_dcp, write_dcp),
    "meta": Format(detect_meta, open_meta, write_meta, weights_only=True),
    "deepspeed": Format(detect_deepspeed, open_deepspeed),
    "hf": Format(detect_hf, open_hf, write_hf, weights_only=True),
    "peft": Format(detect_peft, open_peft, write_peft, weights_only=True),
    "safetensors": Format(
        detect_single, open_single, write_single, weights_only=True, is_file=True
    ),
    "torch": Format(detect_torch, open_torch, write_torch),
}


def targets() -> list[str]:
    """Returns the formats that can be written."""
    return [name for name, one in FORMATS.items() if one.write is not None]


def register_format(name: str, one: Format) -> None:
    """Adds a format that `overland convert`, `eval` and others read and, if it has `write`, that
    `convert --to NAME` writes. It is tried before those that are built in."""
    if name in FORMATS:
        raise CheckpointError(f"a checkpoint format named '{name}' is already registered")
    if not isinstance(one, Format):
        raise CheckpointError(
            f"register_format('{name}') was given a {type(one).__name__}, expected a Format"
        )
    known = dict(FORMATS)
    FORMATS.clear()
    FORMATS.update({name: one, **known})


def open_any(path: str | Path, config: Config = None, whole: bool = True) -> LazyCheckpoint:
    """Opens a checkpoint of any format. `config`: the contents of a config.json, if the checkpoint
    has none. `whole`: whether to add frozen weights that it leaves out."""
    path = path_of(path, "path")
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    for name, one in FORMATS.items():
        if one.detect(path):
            try:
                opened = one.open(path, config)
                opened.companions = opened.companions or companions_in(opened.folder)
                return complete(opened) if whole else opened
            except NOT_AS_EXPECTED as error:
                raise CheckpointError(
                    f"{path} looks like a {name} checkpoint, but its contents are inconsistent: "
                    f"{type(error).__name__} {error!s:.100}"
                ) from error
    raise CheckpointError(
        f"{path} is not a checkpoint in a known format. Known: a run folder or one of its step_N; "
        "a Hugging Face folder; a DCP folder with .metadata; a Meta folder with params.json; a "
        "DeepSpeed folder; a PEFT adapter; model_state_dict.pt; a .safetensors or .pt file"
    )
