"""Named models and flavors, and a user's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from overland.models import (
    DecoderConfig,
    ModelError,
    build_model,
    causal_flops_per_token,
    count_parameters,
    flavor_names,
    flops_per_token,
    model_names,
    register_model,
    registry,
    resolve_config,
)

from .tiny import CASES, hf

# Counts of the released weights (the tied matrix once).
RELEASED = {
    ("llama2", "7B"): 6_738_415_616,
    ("llama2", "13B"): 13_015_864_320,
    ("llama2", "70B"): 68_976_648_192,
    ("llama3", "1B"): 1_235_814_400,
    ("llama3", "3B"): 3_212_749_824,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("mistral", "7B-v0.1"): 7_241_732_096,
    ("mistral", "7B-v0.3"): 7_248_023_552,
    ("qwen2.5", "0.5B"): 494_032_768,
    ("qwen2.5", "7B"): 7_615_616_512,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
}


@pytest.mark.parametrize(("name", "flavor"), list(RELEASED))
def test_flavor_has_the_parameters_of_the_release(name: str, flavor: str) -> None:
    assert count_parameters(resolve_config(name, flavor)).total == RELEASED[name, flavor]


def test_every_flavor_survives_config_json() -> None:
    for name in model_names():
        for flavor in flavor_names(name):
            config = resolve_config(name, flavor)
            if not type(config).__module__.startswith("overland."):
                continue  # another test's, in the same process
            assert registry.read_hf_config(config.to_hf()) == config
            assert config.override({}) == config


@pytest.mark.parametrize("case", list(CASES), ids=" / ".join)
def test_shapes_without_building_are_those_of_the_module(case: tuple[str, str]) -> None:
    config = DecoderConfig.from_hf(CASES[case][0])
    with torch.device("meta"):
        model = build_model(config)
    built = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert built == config.parameter_shapes()
    assert sum(p.numel() for p in model.parameters()) == count_parameters(config).total


def test_debug_model_is_torchtitans() -> None:
    config = resolve_config("llama3", "debugmodel")
    assert config == resolve_config("llama3", "debug")
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (256, 6, 2048)
    assert count_parameters(config).total == 6_163_712


def test_flops_of_llama3_8b() -> None:
    config = resolve_config("llama3", "8B")
    dense = 6 * (8_030_261_248 - 128256 * 4096)
    attention = 12 * 32 * 32 * 128 * 8192
    assert flops_per_token(config, 8192) == dense + attention
    assert causal_flops_per_token(config, 8192) == dense + attention / 2


def test_flops_keep_a_tied_embedding() -> None:
    config = resolve_config("qwen3", "0.6B")
    assert flops_per_token(config, 1) == 6 * 596_049_920 + 12 * 28 * 16 * 128


def test_causal_flops_see_the_window() -> None:
    config = resolve_config("mistral", "7B-v0.1").override({"sliding_window": 4})
    per_key = 12 * 32 * 32 * 128
    dense = 6 * count_parameters(config).in_matmuls
    # 16 places, window 4: 0.5 1.5 2.5 3.5 (halves, as S / 2 is for no window), then 4 each.
    visible = (8 + 12 * 4) / 16
    assert causal_flops_per_token(config, 16) == dense + per_key * visible


def test_misspelled_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ModelError, match="no model 'lama3'; did you mean 'llama3'"):
        resolve_config("lama3", "8B")
    with pytest.raises(ModelError, match="has no flavor '8b'; did you mean '8B'"):
        resolve_config("llama3", "8b")
    with pytest.raises(ModelError, match=r"'hiden_size' is not a field .* did you mean 'hidden_si"):
        resolve_config("llama3", "8B", overrides={"hiden_size": 8})
    with pytest.raises(ModelError, match="needs a flavor: 7B, 13B, 70B"):
        resolve_config("llama2")
    with pytest.raises(
        ModelError, match=r"needs a flavor: it has none, so give the path of a config"
    ):
        resolve_config("hf")


def test_config_file_must_be_of_the_model_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf("qwen3", head_dim=16)))
    assert resolve_config("hf", config_path=tmp_path).model_type == "qwen3"
    assert resolve_config("qwen3", config_path=tmp_path).head_dim == 16
    with pytest.raises(ModelError, match=r"model 'llama3' was asked for, but .* 'qwen3'"):
        resolve_config("llama3", config_path=tmp_path)
    with pytest.raises(ModelError, match="give one of them"):
        resolve_config("qwen3", "8B", config_path=tmp_path)


@dataclass(frozen=True)
class OwnConfig:
    width: int = 4


def test_a_users_module_can_register_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))

    def build(config: OwnConfig, attention: str) -> torch.nn.Module:
        return torch.nn.Linear(config.width, config.width)

    register_model("own", flavors={"base": OwnConfig()}, config_class=OwnConfig, build=build)
    config = resolve_config("own", overrides={"width": 6})
    assert "own" in model_names()
    assert build_model(config).weight.shape == (6, 6)
    with pytest.raises(ModelError, match="'widht' is not a field of OwnConfig; did you mean 'wid"):
        resolve_config("own", "base", overrides={"widht": 6})
    with pytest.raises(ModelError, match="already registered"):
        register_model("own", flavors={}, config_class=OwnConfig)
    register_model("own2", flavors={"a": OwnConfig(3)}, config_class=OwnConfig)
    with pytest.raises(ModelError, match="already has a build function"):
        register_model("own3", flavors={}, config_class=OwnConfig, build=lambda c, a: build(c, a))


def test_a_user_can_add_flavors_of_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))
    register_model("mine", flavors={"tiny": DecoderConfig.from_hf(hf("llama"))})
    assert build_model(resolve_config("mine")).config.vocab_size == 96
