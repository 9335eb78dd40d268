"""Checkpoints to convert: files of the real libraries, and tiny models in every format.

The fixtures were written by DeepSpeed, torch and Meta's layout; each README.json says what must
come out. A few are copied here; the others are looked for in OVERLAND_FIXTURES, or in a folder
`shared/fixtures` beside the repository.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from overland.apps.convert.formats import LazyCheckpoint
from overland.apps.convert.formats.lazy import held
from overland.checkpoint.lazy import Lazy
from overland.models import DecoderConfig
from tests.cli.processes import ROOT
from tests.models.tiny import hf

HERE = Path(__file__).parent / "fixtures"
ELSEWHERE = Path(os.environ.get("OVERLAND_FIXTURES", ROOT.parent / "shared" / "fixtures"))

DEEPSPEED = [f"deepspeed_z{stage}_{kind}" for stage in (1, 2, 3) for kind in ("tied", "untied")]
DCP = ["dcp_fsdp2", "dcp_hsdp"]
META = ["meta_llama2", "meta_llama3"]


def fixture(name: str) -> tuple[Path, dict[str, Any]]:
    """The folder, and what its README expects."""
    for place in (HERE / name, ELSEWHERE / name):
        if (place / "README.json").is_file():
            return place, json.loads((place / "README.json").read_text())["expected"]
    pytest.skip(f"fixture {name} is not here; set OVERLAND_FIXTURES to the folder that has it")


def saved(folder: Path) -> Path:
    """The checkpoint in a fixture's folder."""
    names = ("saved", "data", "meta")
    return next(folder / name for name in names if (folder / name).is_dir())


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A config.json as Overland writes it."""
    return DecoderConfig.from_hf(hf("llama", **changes)).to_hf()


def tiny_source(
    config: dict[str, Any],
    optimizer: bool = True,
    seed: int = 0,
    moments: torch.dtype = torch.float32,
) -> LazyCheckpoint:
    """Weights of order one and moments, all different, with some progress."""
    generator = torch.Generator().manual_seed(seed)

    def some(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Lazy:
        return held(torch.randn(shape, generator=generator).to(dtype))

    shapes = DecoderConfig.from_hf(config).parameter_shapes()
    tensors = {f"model.{name}": some(tuple(shape)) for name, shape in shapes.items()}
    extras: dict[str, Any] = {}
    if optimizer:
        for name, shape in shapes.items():
            for kind in ("exp_avg", "exp_avg_sq"):
                tensors[f"optimizer.{name}.{kind}"] = some(tuple(shape), moments)
        tensors["optimizer.num_updates"] = held(torch.tensor(7.0))
        tensors["scaler.scale"] = held(torch.tensor(1024.0))
        tensors["scaler.good_steps"] = held(torch.tensor(3, dtype=torch.int32))
        matrices = [name for name, shape in shapes.items() if len(shape) >= 2]
        vectors = [name for name, shape in shapes.items() if len(shape) < 2]
        settings = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8}
        extras = {
            "step": 7,
            "batch": 8,
            "tokens": 900,
            "best_validation_loss": 2.5,
            "param_groups": [
                {**settings, "weight_decay": 0.1, "names": matrices},
                {**settings, "weight_decay": 0.0, "names": vectors},
            ],
        }
    return LazyCheckpoint("memory", Path("memory"), tensors, extras, config)


def contents(source: LazyCheckpoint) -> dict[str, torch.Tensor]:
    return {name: source.read(name) for name in source.tensors}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
