"""A user's own config classes, with and without Hugging Face's fields."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from overland.config.derived import resolve_degrees
from overland.config.schema import JobConfig, Lora
from overland.data import registry as sources
from overland.data.registry import register_source
from overland.models import DecoderConfig, register_model, registry, resolve_config
from overland.models import transform as transforms
from overland.models.decoder import Decoder
from overland.models.flops import (
    causal_flops_per_token,
    count_parameters,
    flops_per_token,
    trained_parameters,
)
from overland.models.transform import register_transform
from overland.models.weights import load_hf
from overland.objectives import register_objective
from overland.objectives import registry as objectives
from overland.training.memory import can_estimate, step_memory


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


@dataclass(frozen=True)
class Same(DecoderConfig):
    """Says of itself that it costs what a decoder costs."""

    attention_flops = DecoderConfig.attention_flops
    activations = DecoderConfig.activations


def frozen_teacher(config: DecoderConfig, attention: str) -> nn.Module:
    model = Decoder(config, attention)
    model.teacher = nn.Linear(10, 10, bias=False).requires_grad_(False)
    return model


def test_what_a_class_inherits_about_its_cost_is_not_trusted() -> None:
    base = resolve_config("llama3", "debug")
    values = {name: getattr(base, name) for name in base.__dataclass_fields__}
    dense = flops_per_token(base, 128) - base.attention_flops(128, False)
    for kind, is_trusted in ((Louder, False), (Same, True)):
        registry._MODELS.pop("louder", None)
        registry._MODELS.pop("again", None)
        config = kind(**values)
        build = lambda config, attention: Decoder(config, attention)
        register_model("again", flavors={"a": config}, config_class=kind, build=build)
        assert can_estimate(config) == is_trusted
        assert (flops_per_token(config, 128) == dense) != is_trusted
    assert can_estimate(base)


def test_frozen_parameters_are_not_trained() -> None:
    """Neither those of model.freeze nor those that a model builds frozen."""
    base = resolve_config("llama3", "debug")
    values = {name: getattr(base, name) for name in base.__dataclass_fields__}
    config = Same(**values)
    register_model("taught", flavors={"a": config}, config_class=Same, build=frozen_teacher)
    assert flops_per_token(config, 128) == flops_per_token(base, 128) + 4 * 100
    assert trained_parameters(config, Lora()) == trained_parameters(base, Lora())
    patterns = ["model.layers.0.mlp.*"]
    shapes = trained_parameters(base, Lora())
    mine = [name for name in shapes if name.startswith("model.layers.0.mlp.")]
    number = sum(prod(shapes[name]) for name in mine)
    saved = flops_per_token(base, 128) - flops_per_token(base, 128, freeze=patterns)
    assert saved == 2 * number
    training = {"mixed_precision_param": "float32"}
    plain = JobConfig.model_validate({"training": training})
    job = JobConfig.model_validate({"training": training, "model": {"freeze": patterns}})
    degrees = resolve_degrees(job.parallelism, 1, 1)
    frozen = step_memory(base, job, degrees, "none", compiled=False)
    whole = step_memory(base, plain, degrees, "none", compiled=False)
    assert whole.state - frozen.state == pytest.approx(8 * number)  # two moments
    assert whole.gradients > frozen.gradients


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


def test_weights_load_into_a_module_with_a_config_of_another_library(tmp_path: Path) -> None:
    model = nn.Linear(3, 2, bias=False)
    model.config = SimpleNamespace(hidden_size=3)
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    load_hf(model, tmp_path)
    assert model.weight.sum() == 6


def test_what_registers_a_part_is_a_decorator_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names, register in (
        (sources, "_sources", register_source),
        (objectives, "_OBJECTIVES", register_objective),
        (transforms, "_TRANSFORMS", register_transform),
    ):
        monkeypatch.setattr(module, names, dict(getattr(module, names)))

        @register("mine")
        def make() -> None: ...

        assert getattr(module, names)["mine"] is make
