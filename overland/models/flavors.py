"""Named sizes of the known models, as data; values are those of the released config.json files.

`debugmodel` (alias `debug`) has torchtitan's sizes, so that its recipes give the same model here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from overland.models.config import DecoderConfig
from overland.models.hf_config import RopeConfig


def _sized(
    model: DecoderConfig, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any
) -> DecoderConfig:
    """Returns a model of the same family in another size."""
    return replace(
        model,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **more,
    )


def _llama3_rope(factor: float) -> RopeConfig:
    # Llama 3.1 (8B, 70B, 405B) was released with factor 8, Llama 3.2 (1B, 3B) with factor 32;
    # the other numbers are the same: trained at 8192 first, then stretched to 131072.
    return RopeConfig(
        rope_type="llama3",
        rope_theta=500000.0,
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


_LLAMA2_7B = DecoderConfig(
    model_type="llama",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)
_LLAMA3_8B = replace(
    _LLAMA2_7B,
    vocab_size=128256,
    intermediate_size=14336,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rope=_llama3_rope(8.0),
    bos_token_id=128000,
    eos_token_id=128001,
)
_LLAMA32: dict[str, Any] = {"tie_word_embeddings": True, "rope": _llama3_rope(32.0)}
# torchtitan's: its rule (4 d x 2/3, rounded up to 256) gives 768 for the MLP.
_LLAMA3_DEBUG = replace(
    _sized(_LLAMA3_8B, 256, 768, 6, 16, 16, head_dim=16),
    vocab_size=2048,
    rope=RopeConfig(rope_theta=500000.0),
    bos_token_id=None,
    eos_token_id=None,
)
_MISTRAL_V01 = replace(
    _LLAMA2_7B,
    model_type="mistral",
    intermediate_size=14336,
    num_key_value_heads=8,
    max_position_embeddings=32768,
    sliding_window=4096,
)
_MISTRAL_V03 = replace(
    _MISTRAL_V01, vocab_size=32768, sliding_window=None, rope=RopeConfig(rope_theta=1e6)
)
_QWEN25_7B = DecoderConfig(
    model_type="qwen2",
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    max_position_embeddings=131072,
    rope=RopeConfig(rope_theta=1e6),
    bos_token_id=151643,
    eos_token_id=151643,
)
_QWEN25_SMALL: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
_QWEN3_8B = DecoderConfig(
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rope=RopeConfig(rope_theta=1e6),
    bos_token_id=151643,
    eos_token_id=151645,
)
_QWEN3_TIED = replace(_QWEN3_8B, tie_word_embeddings=True)
_QWEN3_DEBUG = replace(
    _sized(_QWEN3_TIED, 256, 3072, 8, 16, 8),
    vocab_size=2048,
    max_position_embeddings=4096,
    bos_token_id=None,
    eos_token_id=None,
)

# Width, width of the MLP, layers, heads, key-value heads.
FLAVORS: dict[str, dict[str, DecoderConfig]] = {
    "llama2": {
        "7B": _LLAMA2_7B,
        "13B": _sized(_LLAMA2_7B, 5120, 13824, 40, 40, 40),
        "70B": _sized(_LLAMA2_7B, 8192, 28672, 80, 64, 8),
    },
    "llama3": {
        "debugmodel": _LLAMA3_DEBUG,
        "1B": _sized(_LLAMA3_8B, 2048, 8192, 16, 32, 8, head_dim=64, **_LLAMA32),
        "3B": _sized(_LLAMA3_8B, 3072, 8192, 28, 24, 8, **_LLAMA32),
        "8B": _LLAMA3_8B,
        "70B": _sized(_LLAMA3_8B, 8192, 28672, 80, 64, 8),
        # 8 key-value heads, as in the corrected release (the first upload stored 16, each twice).
        "405B": _sized(_LLAMA3_8B, 16384, 53248, 126, 128, 8),
        "debug": _LLAMA3_DEBUG,
    },
    "mistral": {"7B": _MISTRAL_V03, "7B-v0.1": _MISTRAL_V01, "7B-v0.3": _MISTRAL_V03},
    "qwen2.5": {
        "0.5B": _sized(_QWEN25_7B, 896, 4864, 24, 14, 2, **_QWEN25_SMALL),
        "7B": _QWEN25_7B,
    },
    "qwen3": {
        "debugmodel": _QWEN3_DEBUG,
        "0.6B": _sized(_QWEN3_TIED, 1024, 3072, 28, 16, 8),
        "1.7B": _sized(_QWEN3_TIED, 2048, 6144, 28, 16, 8),
        "4B": _sized(_QWEN3_TIED, 2560, 9728, 36, 32, 8),
        "8B": _QWEN3_8B,
        "14B": _sized(_QWEN3_8B, 5120, 17408, 40, 40, 8),
        "32B": _sized(_QWEN3_8B, 5120, 25600, 64, 64, 8),
        "debug": _QWEN3_DEBUG,
    },
}
