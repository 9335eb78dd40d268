"""A user's own config classes, with and without Hugging Face's fields."""

from dataclasses import dataclass

import pytest
from torch import nn

from overland.models import DecoderConfig, register_model, registry, resolve_config
from overland.models.flops import causal_flops_per_token, count_parameters, flops_per_token


@dataclass(frozen=True)
class WideConfig:
    vocab_size: int = 10
    width: int = 7


@dataclass(frozen=True)
class Louder(DecoderConfig):
    volume: int = 11


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))  # gone after the test
    register_model(
        "wide",
        flavors={"base": WideConfig()},
        config_class=WideConfig,
        build=lambda config, attention: nn.Embedding(config.vocab_size, config.width),
    )
    base = resolve_config("llama3", "debug")
    loud = Louder(**{name: getattr(base, name) for name in base.__dataclass_fields__})
    register_model(
        "louder",
        flavors={"base": loud},
        config_class=Louder,
        build=lambda config, attention: nn.Linear(config.volume, 1),
    )


def test_a_model_without_known_shapes_is_counted_by_building_it() -> None:
    config = resolve_config("wide", "base")
    assert count_parameters(config).total == 70
    assert flops_per_token(config, 128) == causal_flops_per_token(config, 128) == 420


def test_overrides_keep_a_subclass_and_its_own_fields() -> None:
    config = resolve_config("louder", "base", overrides={"hidden_size": 64})
    assert type(config) is Louder
    assert (config.hidden_size, config.volume) == (64, 11)


def test_a_subclass_read_from_a_config_file_is_built_by_its_own_function() -> None:
    base = resolve_config("louder", "base")
    assert type(Louder.from_hf(base.to_hf())) is Louder
