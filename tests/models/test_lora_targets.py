"""Names are matched by PEFT's rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overland.config.schema import JobConfig, Lora
from overland.models.build import build_undivided
from overland.models.flops import trained_parameters
from overland.models.lora_targets import by_pattern, is_saved_whole, is_target
from overland.models.registry import model_config
from tests.jobs import TINY_MODEL

Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("q_proj", True),
        ("layers.1.*", True),
        ("_proj", False),  # the end of a name begins after a dot
        ("layers.1", False),
        (f"^{Q}", True),
        ("^model.layers.1", False),  # whole names only
        ("^layers.1.*", False),
    ],
)
def test_patterns(pattern: str, fits: bool) -> None:
    assert by_pattern(Q, {pattern: 7}, 3) == (7 if fits else 3)


def test_saved_modules_take_what_is_in_them_and_have_no_adapters() -> None:
    lora = Lora(rank=4, targets=["q_proj", "up_proj"], modules_to_save=["mlp", "norm"])
    assert is_saved_whole("model.layers.0.mlp.up_proj.weight", lora)
    assert is_saved_whole("model.layers.0.input_layernorm.weight", lora)
    assert not is_saved_whole("model.layers.0.self_attn.q_proj.weight", lora)
    assert is_target("model.layers.0.self_attn.q_proj", lora)
    assert not is_target("model.layers.0.mlp.up_proj", lora)


@pytest.mark.parametrize(
    "lora",
    [
        {"targets": "all-linear", "dora": True},
        {"targets": ["embed_tokens", "v_proj"], "modules_to_save": ["lm_head", "norm"]},
        {"targets": ["up_proj", "q_proj"], "modules_to_save": ["mlp"], "layers": [1]},
    ],
)
def test_shapes_are_known_without_the_model(lora: dict[str, Any]) -> None:
    config = JobConfig.model_validate(
        {"model": {"overrides": TINY_MODEL}, "lora": {"rank": 4, "base": "float32", **lora}}
    )
    architecture = model_config(config.model)
    with torch.device("meta"):
        model = build_undivided(architecture, config)
    built = {n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}
    assert trained_parameters(architecture, config.lora) == built
