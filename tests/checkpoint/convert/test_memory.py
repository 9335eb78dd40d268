"""Conversions stream: a checkpoint larger than the allowance passes through it.

Measured in a process of its own by the kernel's high-water mark, from after the imports on.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from overland.apps.convert.formats import FORMATS, LazyCheckpoint, Options
from overland.checkpoint.lazy import Lazy
from overland.models import DecoderConfig
from tests.models.tiny import hf

ALLOWANCE = 256 * 2**20
SCRIPT = """
import sys
from pathlib import Path

import torch.distributed.checkpoint.filesystem
from overland.apps.convert.formats import Options
from overland.apps.convert import convert

def mark():
    line = next(l for l in open("/proc/self/status") if l.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

Path("/proc/self/clear_refs").write_text("5")
base = mark()
source, target, to, config = sys.argv[1:]
summary = convert(source, target, to, config=config, options=Options(max_shard_bytes=10**8))
assert summary.verified
print(mark() - base, summary.peak_memory, summary.num_bytes)
"""


@dataclass(frozen=True, eq=False)
class Made(Lazy):
    """Numbers that are made when they are asked for."""

    seed: int

    def load(self) -> Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(self.seed))


def source_of(config: dict[str, object], optimizer: bool) -> LazyCheckpoint:
    shapes = DecoderConfig.from_hf(config).parameter_shapes()
    names = [f"model.{name}" for name in shapes]
    if optimizer:
        names += [f"optimizer.{name}.{kind}" for name in shapes for kind in ("exp_avg",)]
    tensors: dict[str, Lazy] = {}
    for seed, name in enumerate(names):
        plain = name.removeprefix("model.").removeprefix("optimizer.").removesuffix(".exp_avg")
        tensors[name] = Made(tuple(shapes[plain]), torch.float32, seed)
    return LazyCheckpoint("memory", Path("memory"), tensors, {}, dict(config))


def measured(source: Path, target: Path, to: str, config: Path) -> int:
    """The bytes that a conversion needed above the imports."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(source), str(target), to, str(config)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    growth, reported, _ = map(int, result.stdout.split())
    assert abs(growth - reported) < 2**25  # what is printed to the user is true
    return growth


ALL = ("torch", "dcp", "overland", "meta", "safetensors", "hf")


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_every_target_streams(tmp_path: Path) -> None:
    """A chain through formats, each the source of the next. 16 MB is the largest tensor."""
    config = hf(
        "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=7,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    source = source_of(config, optimizer=False)
    total = sum(lazy.nbytes for lazy in source.tensors.values())
    largest = max(lazy.nbytes for lazy in source.tensors.values())
    allowed = 2 * largest + ALLOWANCE
    assert total > 1.4 * allowed  # or loading everything would go unnoticed
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "start"
    path.mkdir()
    FORMATS["hf"].write(source, path, Options())
    for to in ALL:
        target = tmp_path / (f"{to}.safetensors" if to == "safetensors" else to)
        growth = measured(path, target, to, tmp_path / "config.json")
        assert growth <= allowed, f"{to} needed {growth / 2**20:.0f} MiB"
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        path = target


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_deepspeed_streams(tmp_path: Path) -> None:
    """There all parameters are one vector, larger than the allowance by itself."""
    shapes = {f"layers.{i}.weight": (1024, 4096) for i in range(24)}
    numel = sum(torch.Size(shape).numel() for shape in shapes.values())
    allowed = 2 * 2**24 + ALLOWANCE
    assert numel * 4 > 1.3 * allowed
    source = tmp_path / "source"
    source.mkdir()
    state = {"module": {}, "param_shapes": [{n: torch.Size(s) for n, s in shapes.items()}]}
    torch.save(state, source / "mp_rank_00_model_states.pt")
    flat = torch.arange(numel, dtype=torch.float32)
    optimizer = {
        "zero_stage": 2,
        "partition_count": [1],
        "single_partition_of_fp32_groups": [flat],
        "base_optimizer_state": {"state": {}, "param_groups": []},
    }
    torch.save(
        {"optimizer_state_dict": optimizer},
        source / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    )
    del flat, optimizer
    (source / "config.json").write_text("{}")
    growth = measured(source, tmp_path / "out", "torch", source / "config.json")
    assert growth <= allowed, f"{growth / 2**20:.0f} MiB"
    third = torch.load(tmp_path / "out" / "model_state_dict.pt", mmap=True)["layers.2.weight"]
    assert third[0, 0] == 2 * 1024 * 4096
