"""Frequencies at the sizes of real models, where all branches of a kind are taken."""

from __future__ import annotations

import pytest
import torch

from overland.models import DecoderConfig, RopeConfig, resolve_config
from overland.models.rope import Rotary, inverse_frequencies, rotate

YARN = RopeConfig(
    rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768
)
REAL: dict[str, tuple[DecoderConfig, int]] = {
    "llama 2": (resolve_config("llama2", "7B"), 4096),
    "llama 3.1": (resolve_config("llama3", "8B"), 8192),
    "llama 3.2": (resolve_config("llama3", "1B"), 8192),
    "qwen 2.5 yarn": (resolve_config("qwen2.5", "7B", overrides={"rope": YARN}), 131072),
    "linear": (
        resolve_config("llama2", "7B", overrides={"rope_scaling": {"type": "linear", "factor": 8}}),
        32768,
    ),
    "dynamic": (
        resolve_config(
            "llama2", "7B", overrides={"rope_scaling": {"type": "dynamic", "factor": 2}}
        ),
        16384,
    ),
}


@pytest.mark.parametrize("name", list(REAL))
def test_frequencies_equal_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config, seq_len = REAL[name]
    theirs = transformers.AutoConfig.for_model(**config.to_hf())
    kind = config.rope.rope_type
    if kind == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        expected, scaling = LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        make = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind]
        expected, scaling = make(theirs, torch.device("cpu"), seq_len=seq_len)
    ours, our_scaling = inverse_frequencies(
        config.rope, config.head_dim, config.max_position_embeddings, seq_len
    )
    assert our_scaling == pytest.approx(scaling)
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=0)


def test_llama3_keeps_blends_and_slows() -> None:
    config, _ = REAL["llama 3.1"]
    plain, _ = inverse_frequencies(RopeConfig(rope_theta=500000.0), 128, 131072, 1)
    scaled, _ = inverse_frequencies(config.rope, 128, 131072, 1)
    ratio = plain / scaled
    assert (ratio[:29] == 1).all()
    assert ((ratio[29:35] > 1) & (ratio[29:35] < 8)).all()
    torch.testing.assert_close(ratio[35:], torch.full((29,), 8.0))


def test_rotation_is_relative_and_keeps_lengths() -> None:
    rotary = Rotary(RopeConfig(), head_dim=16, max_position_embeddings=64)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    scores = []
    for shift in (0, 7, 1000):
        positions_BS = torch.tensor([[3 + shift, 11 + shift]])
        cos, sin = rotary(positions_BS, 64, torch.float64)
        turned_q = rotate(q, cos[:, None, :1], sin[:, None, :1])
        turned_k = rotate(k, cos[:, None, 1:], sin[:, None, 1:])
        torch.testing.assert_close(turned_q.norm(), q.norm())
        scores.append((turned_q * turned_k).sum())
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3))


def test_bfloat16_angles_are_computed_in_float32() -> None:
    rotary = Rotary(RopeConfig(), head_dim=16, max_position_embeddings=64)
    positions_BS = torch.tensor([[100_003]])
    narrow, _ = rotary(positions_BS, 64, torch.bfloat16)
    wide, _ = rotary(positions_BS, 64, torch.float32)
    assert torch.equal(narrow, wide.to(torch.bfloat16))
