"""What a setting does not reach is reported, with names and counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from overland.checks.own_model import left_out
from overland.config.schema import JobConfig
from overland.errors import ModelError
from overland.models import DecoderConfig, register_model, registry
from overland.models.decoder import Decoder
from overland.models.init import Normal
from tests.optimizers import own

assert own  # it registers Muon

SIZES: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip


@dataclass(frozen=True)
class ExpertsConfig(DecoderConfig):
    pass


class Experts(nn.Module):
    """Matrices that are no linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(2, 64, 64))
        self.mix = nn.Parameter(torch.empty(64, 64))

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return x_BSD @ self.up[0] @ self.mix


class ExpertsDecoder(Decoder):
    def init_rule(self, name: str) -> Any:
        return Normal(0.02, name) if ".mlp." in name else super().init_rule(name)


def build(config: ExpertsConfig, attention: str) -> nn.Module:
    model = ExpertsDecoder(config, attention)
    for layer in model.model.layers.values():
        layer.mlp = Experts()
    return model


def notes(model: DecoderConfig, /, **sections: Any) -> list[str]:
    return left_out(model, JobConfig.model_validate(sections))


UP, MIX = "model.layers.*.mlp.up (3)", "model.layers.*.mlp.mix (3)"
SETTINGS: dict[str, dict[str, Any]] = {
    "training.float8": {"training": {"float8": "tensorwise"}},
    "lora.targets": {"lora": {"rank": 2, "targets": "all-linear"}},
    "model.sparse": {"model": {"sparse": {}}},
    "lora.base = nf4": {"lora": {"rank": 2, "targets": ["q_proj"], "base": "nf4"}},
}


@pytest.mark.parametrize("key", SETTINGS)
def test_matrices_that_are_no_linear_layers_are_named(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))
    config = ExpertsConfig(**SIZES)
    register_model("mixed", flavors={"a": config}, config_class=ExpertsConfig, build=build)
    (said,) = notes(config, **SETTINGS[key])
    assert said.startswith(f"{key} leaves out {UP} and {MIX}")
    assert notes(DecoderConfig(**SIZES), **SETTINGS[key]) == []


def test_what_a_whole_matrix_rule_passes_over_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))
    config = ExpertsConfig(**SIZES)
    register_model("mixed", flavors={"a": config}, config_class=ExpertsConfig, build=build)
    (said,) = notes(config, optimizer={"name": "Muon"})
    assert said == f"Muon leaves model.embed_tokens.weight, {UP} and lm_head.weight to AdamW"


@dataclass(frozen=True)
class UndescribedConfig:
    vocab_size: int = 96


@pytest.mark.parametrize("key", ["training.float8", "model.sparse", "lora.base = nf4"])
def test_a_setting_that_reaches_no_matrix_is_refused(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """A model without structure() has no blocks."""
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))
    config = UndescribedConfig()
    made = lambda config, attention: nn.Sequential(nn.Linear(64, 64))
    register_model("bare", flavors={"a": config}, config_class=UndescribedConfig, build=made)
    settings = dict(SETTINGS[key])
    if "lora" in settings:
        settings["lora"] = {**settings["lora"], "targets": ["0"]}
    with pytest.raises(ModelError, match="linear layer"):
        notes(config, **settings)
