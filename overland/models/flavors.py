"""Named sizes of the known models, as data; values are those of the released config.json files.

`debugmodel` (alias `debug`) has torchtitan's sizes, so that its recipes give the same model here.
"""

from __future__ import annotations

from dataclasses import replace

from overland.models.config import DecoderConfig
from overland.models.hf_config import RopeConfig


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


_LLAMA2 = DecoderConfig(
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

LLAMA2: dict[str, DecoderConfig] = {
    "7B": _LLAMA2,
    "13B": replace(
        _LLAMA2,
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=40,
    ),
    "70B": replace(
        _LLAMA2,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
}

_LLAMA3_8B = DecoderConfig(
    model_type="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope=_llama3_rope(8.0),
    bos_token_id=128000,
    eos_token_id=128001,
)

LLAMA3: dict[str, DecoderConfig] = {
    # torchtitan's: its rule (4 d x 2/3, rounded up to 256) gives 768 for the MLP.
    "debugmodel": DecoderConfig(
        model_type="llama",
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=16,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope=RopeConfig(rope_theta=500000.0),
    ),
    "1B": replace(
        _LLAMA3_8B,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        head_dim=64,
        tie_word_embeddings=True,
        rope=_llama3_rope(32.0),
    ),
    "3B": replace(
        _LLAMA3_8B,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        tie_word_embeddings=True,
        rope=_llama3_rope(32.0),
    ),
    "8B": _LLAMA3_8B,
    "70B": replace(
        _LLAMA3_8B,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
    ),
    # 8 key-value heads, as in the corrected release (the first upload stored 16, each twice).
    "405B": replace(
        _LLAMA3_8B,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
    ),
}

_MISTRAL_V01 = DecoderConfig(
    model_type="mistral",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    sliding_window=4096,
    bos_token_id=1,
    eos_token_id=2,
)
_MISTRAL_V03 = replace(
    _MISTRAL_V01, vocab_size=32768, sliding_window=None, rope=RopeConfig(rope_theta=1e6)
)

MISTRAL: dict[str, DecoderConfig] = {
    "7B": _MISTRAL_V03,
    "7B-v0.1": _MISTRAL_V01,
    "7B-v0.3": _MISTRAL_V03,
}

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

QWEN25: dict[str, DecoderConfig] = {
    "0.5B": replace(
        _QWEN25_7B,
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "7B": _QWEN25_7B,
}


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, tied: bool) -> DecoderConfig:
    return DecoderConfig(
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
        rope=RopeConfig(rope_theta=1e6),
        bos_token_id=151643,
        eos_token_id=151645,
    )


QWEN3: dict[str, DecoderConfig] = {
    "debugmodel": replace(
        _qwen3(256, 3072, 8, 16, tied=True),
        vocab_size=2048,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "14B": _qwen3(5120, 17408, 40, 40, tied=False),
    "32B": _qwen3(5120, 25600, 64, 64, tied=False),
}

LLAMA3["debug"] = LLAMA3["debugmodel"]
QWEN3["debug"] = QWEN3["debugmodel"]

FLAVORS: dict[str, dict[str, DecoderConfig]] = {
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
}
