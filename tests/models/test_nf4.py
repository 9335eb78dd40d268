"""Frozen weights in 4 bits: values, products, and runs compared with the same weights unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from overland.apps.convert import convert
from overland.apps.convert.formats import open_any
from overland.apps.convert.verify import model_with_weights
from overland.apps.evaluation import model as evaluation
from overland.apps.evaluation.main import open_model
from overland.apps.proofs.layouts import WAYS, parse
from overland.apps.proofs.pool import RankPool
from overland.checks import load_checked
from overland.config.errors import ConfigError
from overland.config.schema import JobConfig
from overland.errors import CheckpointError, ModelError
from overland.kernels.nf4 import LEVELS, pack, row_bytes, unpack
from overland.models.lora import LoRALinear, adapt
from overland.models.nf4 import NF4Linear, narrow
from overland.models.registry import read_hf_config
from overland.training.memory import NF4_BYTES
from tests.checkpoint.test_adapters import BASE, job
from tests.jobs import losses


def dense(weight_OD: torch.Tensor) -> torch.Tensor:
    return unpack(pack(weight_OD), torch.float32)


def test_levels_are_those_of_qlora() -> None:
    assert len(LEVELS) == 16
    assert row_bytes(64) / 64 == NF4_BYTES
    below = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500)
    above = (0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0)
    assert pytest.approx((*below, 0.0, *above), abs=3e-7) == LEVELS


def test_weights_keep_the_nearest_level_of_their_block() -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 192, generator=draw) * torch.logspace(-6, 3, 6)[:, None]
    weight[2, 64:128] = 0
    found = dense(weight)
    assert torch.equal(dense(found), found)
    assert torch.equal(found[2, 64:128], torch.zeros(64))
    scales = weight.unflatten(1, (3, 64)).abs().amax(2).bfloat16().float()
    every = torch.tensor(LEVELS)[:, None, None, None] * scales[None, :, :, None]
    nearest = (every - weight.unflatten(1, (3, 64))).abs().amin(0).flatten(1)
    torch.testing.assert_close((found - weight).abs(), nearest, rtol=1e-5, atol=0)
    assert torch.equal(dense(weight[3:5]), found[3:5])  # whatever is held of the matrix
    with pytest.raises(ModelError, match="not finite"):
        pack(torch.full((1, 64), float("nan")))


@pytest.mark.parametrize("adapted", [False, True])
def test_a_product_keeps_nothing_wide(adapted: bool) -> None:
    torch.manual_seed(0)
    module = nn.Linear(128, 96)
    weight, bias = dense(module.weight.detach()), module.bias.detach()
    small = torch.zeros(96, 128)
    if adapted:
        adapter = adapt(module, 4, 0.5)
        small = 0.5 * (adapter.lora_B.weight @ adapter.lora_A.weight).detach()
    packed = pack(module.weight.detach())
    narrow(module, "it")
    assert isinstance(module, LoRALinear if adapted else NF4Linear)
    module.weight.data = packed
    module.bias.requires_grad_(False)
    x = torch.randn(2, 5, 128, requires_grad=True)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = module(x)
    torch.testing.assert_close(out, nn.functional.linear(x, weight + small, bias))
    (grad,) = torch.autograd.grad(out.sum(), x)
    expected = (weight + small).sum(0).expand_as(x)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)
    assert not any(one.numel() == weight.numel() and one.dtype != torch.uint8 for one in kept)


LORA = {"rank": 4, "targets": "all-linear", "exclude": ["o_proj"], "dropout": 0.1}
WIDE = {"dtype": "float64", "mixed_precision_param": "float64", "mixed_precision_reduce": "float64"}


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base with every matrix of its blocks as 4 bits keep it, but written out."""
    folder = tmp_path_factory.mktemp("rounded")
    weights = load_file(BASE / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            weights[name] = dense(weight)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_bytes((BASE / "config.json").read_bytes())
    return folder


def narrow_job(folder: Path, layout: str = "shard1", base: str = "nf4", **sections: Any) -> Any:
    lora = {**LORA, "base": base, "save_as_peft": False, **sections.pop("lora", {})}
    made = job(folder, layout, lora=lora, **sections).model_dump()
    for change in [{"training": WIDE}, *(WAYS[way] for way in parse(layout).ways)]:
        for section, values in change.items():
            made[section] |= values
    return JobConfig.model_validate(made)


@pytest.mark.parametrize("layout", ["shard2:full", "cp2:op", "pp2:GPipe"])
def test_a_run_beside_4_bits_is_one_beside_the_same_weights(
    layout: str, rounded: Path, ranks: RankPool, tmp_path: Path
) -> None:
    kind = {"dora": True} if layout == "shard2:full" else {}
    start = {"initial_load_path": str(rounded), "enable": False}
    wide = narrow_job(tmp_path, base="auto", checkpoint=start, lora=kind)
    expected = ranks.run(1, losses, wide)[0]
    off = {"enable": False}
    found = ranks.run(2, losses, narrow_job(tmp_path, layout, checkpoint=off, lora=kind))[0]
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_run_beside_4_bits_goes_on_generates_and_is_not_merged(
    ranks: RankPool, rounded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ranks.run(2, losses, narrow_job(tmp_path / "whole", "shard2"))[0]
    rates = {"warmup_steps": 2, "total_steps": 3}
    ranks.run(2, losses, narrow_job(tmp_path / "two", "shard2", steps=2, lr_scheduler=rates))
    again = ranks.run(2, losses, narrow_job(tmp_path / "two", "shard2"))[0]
    assert again == whole[2:]
    monkeypatch.setattr(evaluation, "tokenizer_of", lambda run, data: Mock(end_id=None))
    model = open_model(tmp_path / "two").model
    convert(tmp_path / "two", tmp_path / "peft", "peft")
    convert(rounded, tmp_path / "same", "hf", adapter=tmp_path / "peft", merge_lora=True)
    merged = open_any(tmp_path / "same")
    same = model_with_weights(merged, read_hf_config(merged.config or {}))
    tokens_BS = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.allclose(model(tokens_BS), same(tokens_BS), rtol=0, atol=1e-5)
    with pytest.raises(CheckpointError, match="was trained on 4-bit weights"):
        convert(tmp_path / "two", tmp_path / "merged", "hf", merge_lora=True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "set model.from"),
        (["checkpoint.type=full"], "checkpoint.type = full would also save the frozen weights"),
        (["parallelism.tensor_parallel_degree=2"], "tensor parallelism splits rows"),
        (["training.float8=tensorwise"], "choose one of the two"),
    ],
)
def test_check_refuses_what_4_bits_cannot_do(more: list[str], message: str) -> None:
    source = [f"checkpoint.initial_load_path={BASE}"] if more else []
    asked = [f"model.config={BASE}", *source, "lora.rank=4", "lora.base=nf4", *more]
    with pytest.raises(ConfigError, match=message):
        load_checked("llama3_debug", asked)
