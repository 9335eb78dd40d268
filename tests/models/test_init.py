"""Initial weights are a pure function of seed, name and place."""

from __future__ import annotations

import math

import pytest
import torch

from overland.models import DecoderConfig, ModelError, build_model
from overland.models import init as init_module
from overland.models.init import Normal, Part, fill_random, init_weights

from .tiny import hf


def numbers(*shape: int, name: str = "a", seed: int = 0, std: float = 1.0) -> torch.Tensor:
    tensor = torch.empty(shape)
    fill_random(tensor, seed, Normal(std, name), (0,) * len(shape), shape)
    return tensor


def test_numbers_are_standard_normal() -> None:
    x = numbers(1000, 1000).double()
    # Bounds are 5 standard errors at a million numbers.
    assert abs(x.mean()) < 5e-3
    assert abs(x.std() - 1) < 4e-3
    assert abs((x**3).mean()) < 5 * math.sqrt(15) * 1e-3
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96) * 1e-3
    assert abs((x.abs() > 3).double().mean() - 0.0026998) < 2.6e-4
    assert 4.3 < x.abs().max() < 6.8


def test_neighbors_names_and_seeds_are_independent() -> None:
    x = numbers(1000, 1000).flatten().double()
    others = [
        x.roll(1),
        x.roll(1000),
        numbers(1000, 1000, name="b").flatten().double(),
        numbers(1000, 1000, seed=1).flatten().double(),
    ]
    for other in others:
        assert abs((x * other).mean()) < 5e-3
        assert abs(((x**2 - 1) * (other**2 - 1)).mean()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_shard_equals_its_slice_of_the_whole(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (37, 23)
    whole = torch.empty(shape, dtype=dtype)
    fill_random(whole, 7, Normal(0.02, "w"), (0, 0), shape)
    monkeypatch.setattr(init_module, "_CHUNK", 50)  # chunks must not show either
    for rows in ((0, 37), (0, 1), (5, 18), (36, 37), (12, 12)):
        for columns in ((0, 23), (3, 4), (7, 23)):
            part = torch.empty(rows[1] - rows[0], columns[1] - columns[0], dtype=dtype)
            fill_random(part, 7, Normal(0.02, "w"), (rows[0], columns[0]), shape)
            assert torch.equal(part, whole[slice(*rows), slice(*columns)])


def test_all_types_start_from_the_same_numbers() -> None:
    wide, narrow = torch.empty(64, 8, dtype=torch.float64), torch.empty(64, 8)
    fill_random(wide, 0, Normal(0.02, "w"), (0, 0), (64, 8))
    fill_random(narrow, 0, Normal(0.02, "w"), (0, 0), (64, 8))
    assert torch.equal(wide, narrow.double())


def test_the_bits_do_not_change_between_versions() -> None:
    """Runs are compared across releases by their seed: these numbers are part of the promise."""
    expected = torch.tensor(
        [0.846482, 0.717642, -0.423323, 0.746776, 0.645099, 1.950425, -0.142656, -0.404273]
    )
    torch.testing.assert_close(numbers(4, 2).flatten(), expected, atol=1e-6, rtol=0)


def test_scheme() -> None:
    config = DecoderConfig.from_hf(
        hf("llama", hidden_size=128, intermediate_size=256, attention_bias=True)
    )
    model = build_model(config)
    init_weights(model, seed=0)
    residual = 0.2 / math.sqrt(2 * 3)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
        else:
            expected = residual if "o_proj" in name or "down_proj" in name else 0.2
            assert abs(parameter.std() / expected - 1) < 0.05, name


def test_meta_construction_gives_the_same_model_and_keeps_the_tie() -> None:
    config = DecoderConfig.from_hf(hf("qwen2", tie_word_embeddings=True))
    direct = build_model(config)
    with torch.device("meta"):
        model = build_model(config)
    with pytest.raises(ModelError, match="is on the meta device"):
        init_weights(model, seed=3)
    model.to_empty(device="cpu")
    assert not list(model.buffers())
    for each in (model, direct):
        init_weights(each, seed=3)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokens_BS = torch.randint(0, 96, (1, 9))
    assert torch.equal(model(tokens_BS), direct(tokens_BS))


def test_local_parts_and_pipeline_stages_start_from_the_same_bits() -> None:
    config = DecoderConfig.from_hf(hf("llama", tie_word_embeddings=True))
    full, stage = build_model(config), build_model(config)
    init_weights(full, seed=1)
    stage.model.embed_tokens = None
    del stage.model.layers["0"]

    def second_half(parameter: torch.nn.Parameter) -> Part:
        half = parameter.shape[0] // 2
        return parameter.data[half:], (half, *[0] * (parameter.dim() - 1)), parameter.shape

    init_weights(stage, seed=1, local_part=second_half)
    reference = full.state_dict()
    assert "lm_head.weight" in dict(stage.named_parameters())
    for name, parameter in stage.named_parameters():
        half = parameter.shape[0] // 2
        assert torch.equal(parameter[half:], reference[name][half:]), name
