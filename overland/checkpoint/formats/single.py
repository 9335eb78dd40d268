"""One safetensors file with all weights: what DeepSpeed's `zero_to_fp32` makes."""

from __future__ import annotations

from pathlib import Path

from overland.checkpoint.formats.options import Options
from overland.checkpoint.formats.safetensors_file import read_safetensors, write_safetensors
from overland.checkpoint.formats.source import MODEL, Config, Source, companions_in, config_near


def detect_single(path: Path) -> bool:
    return path.is_file() and path.suffix == ".safetensors"


def open_single(path: Path, config: Config = None) -> Source:
    return Source(
        "safetensors",
        path.parent,
        {MODEL + name: lazy for name, lazy in read_safetensors(path).items()},
        config=config or config_near(path.parent),
        companions=companions_in(path.parent),
    )


def write_single(source: Source, file: Path, options: Options) -> None:
    write_safetensors(file, source.weights())
