"""Tiny models of every family, as config.json contents in the forms found in practice."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    # Ten times the usual width, so that logits are of order one and differences would show.
    "initializer_range": 0.2,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def hf(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config.json of a tiny model."""
    return {"model_type": model_type, **SIZES, **changes}


def _rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **numbers}}


# (family, rope) -> (config.json, sequence length). 80 tokens are beyond the 64 of training.
CASES: dict[tuple[str, str], tuple[dict[str, Any], int]] = {
    ("Llama 2", "default, old keys"): (
        hf("llama", num_key_value_heads=4, rope_theta=10000.0, rope_scaling=None),
        40,
    ),
    ("Llama 3", "default, old keys"): (hf("llama", rope_theta=500000.0), 40),
    ("Llama 3.1", "llama3, old keys"): (
        hf("llama", rope_theta=500000.0, rope_scaling=LLAMA3_ROPE),
        40,
    ),
    ("Llama 3.1", "llama3"): (
        hf("llama", rope_parameters=LLAMA3_ROPE | {"rope_theta": 500000.0}),
        40,
    ),
    ("Llama 3.2, tied", "llama3"): (
        hf(
            "llama",
            tie_word_embeddings=True,
            rope_parameters=LLAMA3_ROPE | {"rope_theta": 500000.0, "factor": 32.0},
        ),
        40,
    ),
    ("Llama, all biases", "default"): (hf("llama", attention_bias=True, mlp_bias=True), 40),
    ("Llama, head_dim 12", "default"): (hf("llama", head_dim=12), 40),
    ("Llama", "linear, old type key"): (
        hf("llama", rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 2.0}),
        80,
    ),
    ("Llama", "linear"): (hf("llama", **_rope("linear", factor=4.0)), 80),
    ("Llama", "dynamic, within"): (hf("llama", **_rope("dynamic", factor=2.0)), 40),
    ("Llama", "dynamic, beyond"): (hf("llama", **_rope("dynamic", factor=2.0)), 80),
    ("Llama", "dynamic, old type key"): (
        hf("llama", rope_theta=10000.0, rope_scaling={"type": "dynamic", "factor": 3.0}),
        80,
    ),
    ("Llama", "yarn"): (
        hf("llama", **_rope("yarn", factor=4.0, original_max_position_embeddings=16)),
        80,
    ),
    ("Llama", "yarn, all numbers"): (
        hf(
            "llama",
            **_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                beta_fast=16.0,
                beta_slow=2.0,
                attention_factor=1.3,
                truncate=False,
            ),
        ),
        80,
    ),
    ("Llama", "yarn, mscale"): (
        hf(
            "llama",
            **_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=0.7,
                mscale_all_dim=1.1,
            ),
        ),
        80,
    ),
    ("Mistral, window 8", "default"): (hf("mistral", sliding_window=8), 40),
    ("Mistral, no window", "default, old keys"): (
        hf("mistral", sliding_window=None, rope_theta=1e6),
        40,
    ),
    ("Mistral, head_dim 12", "default"): (hf("mistral", sliding_window=8, head_dim=12), 40),
    ("Qwen2, qkv bias", "default, old keys"): (hf("qwen2", rope_theta=1e6), 40),
    ("Qwen2, last layers in a window", "default"): (
        hf("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
        40,
    ),
    ("Qwen2, layer_types", "default"): (
        hf(
            "qwen2",
            use_sliding_window=True,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        40,
    ),
    ("Qwen2, tied", "yarn, old type key"): (
        hf(
            "qwen2",
            tie_word_embeddings=True,
            rope_theta=1e6,
            rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        40,
    ),
    ("Qwen3, head_dim 16", "default"): (hf("qwen3", head_dim=16, **_rope("default")), 40),
    ("Qwen3, tied, biases", "yarn"): (
        hf(
            "qwen3",
            head_dim=16,
            tie_word_embeddings=True,
            attention_bias=True,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=16),
        ),
        40,
    ),
    ("Qwen3, window", "default"): (
        hf("qwen3", head_dim=16, use_sliding_window=True, sliding_window=8, max_window_layers=2),
        40,
    ),
}
