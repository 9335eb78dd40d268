"""What a dense decoder is: one frozen record with Hugging Face's field names.

The families differ by switches, never by copies of the model:

| model_type | qkv bias | o_proj bias | mlp bias | qk-norm | sliding window | head_dim |
|---|---|---|---|---|---|---|
| llama   | attention_bias | attention_bias | mlp_bias | no  | no                     | free |
| mistral | no             | no             | no       | no  | every layer, or none   | free |
| qwen2   | always         | no             | no       | no  | chosen layers, or none | free |
| qwen3   | attention_bias | attention_bias | no       | yes | chosen layers, or none | free |

One switch is not Hugging Face's: a llama may have `norm_type = "layernorm"`, LayerNorm with a
weight and no bias, as older torchtitan had. No config.json says so to transformers, so such a model
is not exported.

Imports no torch, so that the config room and `--help` stay quick.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overland.errors import ModelError

if TYPE_CHECKING:
    from overland.models.activations import Activations, Pass
    from overland.models.structure import Structure

FULL, SLIDING = "full_attention", "sliding_attention"
RMSNORM, LAYERNORM = "rmsnorm", "layernorm"
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: the kind and its numbers; those that a kind does not use stay None."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    # llama3
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    # yarn
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ModelError(
                f"rope_type '{self.rope_type}' is not supported; known kinds: "
                f"{', '.join(ROPE_TYPES)}"
            )
        if not 0 < self.rope_theta < math.inf:
            raise ModelError(f"rope_theta must be positive, got {self.rope_theta}")
        allowed = _ROPE_REQUIRED[self.rope_type] | _ROPE_OPTIONAL.get(self.rope_type, frozenset())
        for item in fields(self):
            if item.name in ("rope_type", "rope_theta"):
                continue
            value = getattr(self, item.name)
            if value is None and item.name in _ROPE_REQUIRED[self.rope_type]:
                raise ModelError(f"rope_type '{self.rope_type}' needs {item.name}, which is absent")
            if value is not None and not math.isfinite(value):
                raise ModelError(f"rope's {item.name} must be a finite number, got {value}")
            if value is not None and item.name not in allowed:
                raise ModelError(f"rope_type '{self.rope_type}' has no {item.name} (got {value})")
        if self.factor is not None and self.factor < 1:
            raise ModelError(f"rope factor must be at least 1, got {self.factor}")


_ROPE_REQUIRED: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
        }
    ),
}
_ROPE_OPTIONAL: dict[str, frozenset[str]] = {
    "yarn": frozenset(
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    ),
    # Written by some exporters; the dynamic rule itself reads max_position_embeddings.
    "dynamic": frozenset({"original_max_position_embeddings"}),
}


@dataclass(frozen=True)
class Family:
    """What a model_type fixes, and what its config.json may choose."""

    qk_norm: bool = False
    qkv_bias: bool = False  # always on, whatever config.json says
    chooses_attention_bias: bool = False
    chooses_mlp_bias: bool = False
    chooses_norm: bool = False
    window: str = "none"  # "none" | "all" (every layer or no layer) | "layers" (any subset)


FAMILIES: dict[str, Family] = {
    "llama": Family(chooses_attention_bias=True, chooses_mlp_bias=True, chooses_norm=True),
    "mistral": Family(window="all"),
    "qwen2": Family(qkv_bias=True, window="layers"),
    "qwen3": Family(qk_norm=True, chooses_attention_bias=True, window="layers"),
}


@dataclass(frozen=True)
class DecoderConfig:
    """A dense causal decoder. `head_dim` and `num_key_value_heads` of 0 mean "derive them"."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    norm_type: str = RMSNORM
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    initializer_range: float = 0.02
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    # One of FULL or SLIDING per layer; empty means that all layers agree (SLIDING if there is a
    # window), which is what keeps an override of num_hidden_layers a single key.
    layer_types: tuple[str, ...] = ()
    rope: RopeConfig = field(default_factory=RopeConfig)
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> DecoderConfig:
        """From the contents of a config.json, its path, or the folder that holds it."""
        from overland.models import hf_config

        config = hf_config.read_config(source)
        if cls is DecoderConfig:
            return config
        # A user's subclass is built by its own function, so it must stay what it is.
        return cls(**{item.name: getattr(config, item.name) for item in fields(DecoderConfig)})

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this model, in a form that transformers 4 and 5 both read."""
        from overland.models import hf_config

        return hf_config.config_as_hf(self)

    def override(self, overrides: Mapping[str, Any]) -> DecoderConfig:
        """This config with some Hugging Face keys replaced; an unknown key is a ModelError."""
        from overland.models import hf_config

        return hf_config.override_config(self, overrides)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by its Hugging Face name; a tied lm_head is not listed."""
        from overland.models import parameters

        return parameters.parameter_shapes(self)

    def structure(self) -> Structure:
        """What the model is made of. A subclass has a `build` of its own, which may change what
        blocks do."""
        from overland.models import parameters

        return parameters.decoder_structure(self, plain=type(self) is DecoderConfig)

    def attention_flops(self, seq_len: int, causal: bool) -> float:
        """Training FLOP per token of attention itself; `causal` counts visible keys alone."""
        windows = [self.window_of(layer) for layer in range(self.num_hidden_layers)]
        keys = sum(_mean_visible_keys(seq_len, window) if causal else seq_len for window in windows)
        return 12 * self.num_attention_heads * self.head_dim * keys

    def activations(self, one: Pass) -> Activations:
        """Memory that a pass takes beside parameters and gradients."""
        from overland.models import activations

        return activations.decoder_activations(self, one)

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def qk_norm(self) -> bool:
        return self.family.qk_norm

    @property
    def qkv_bias(self) -> bool:
        return self.family.qkv_bias or self.attention_bias

    @property
    def o_proj_bias(self) -> bool:
        return self.attention_bias

    def window_of(self, layer: int) -> int | None:
        """Sliding window of a layer, None where it sees everything before it."""
        if self.layer_types and self.layer_types[layer] == FULL:
            return None
        return self.sliding_window

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES:
            raise ModelError(
                f"model_type '{self.model_type}' is not supported; known: {', '.join(FAMILIES)}"
            )
        # Frozen, so derived sizes are put in by the back door, once.
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if not self.head_dim and self.num_attention_heads:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        _check_sizes(self)
        _check_switches(self)


def _mean_visible_keys(seq_len: int, window: int | None) -> float:
    width = seq_len if window is None else min(window, seq_len)
    # The first `width` queries see width / 2 keys on average, all later ones see `width`.
    return width - width * width / (2 * seq_len)


def _check_sizes(config: DecoderConfig) -> None:
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ):
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{name} must be a positive whole number, got {value!r}")
    if not 0 < config.rms_norm_eps < math.inf:
        raise ModelError(f"rms_norm_eps must be positive, got {config.rms_norm_eps}")
    if not 0 <= config.initializer_range < math.inf:
        raise ModelError(
            f"initializer_range must be a number, 0 or more, got {config.initializer_range}"
        )
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ModelError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if config.head_dim % 2:
        raise ModelError(f"head_dim must be even for rotary embeddings, got {config.head_dim}")
    if config.model_type == "llama" and config.hidden_size % heads:
        # transformers refuses to read such a config back.
        raise ModelError(
            f"llama needs hidden_size {config.hidden_size} to be a multiple of "
            f"num_attention_heads {heads}"
        )


def _check_switches(config: DecoderConfig) -> None:
    family, kind = config.family, config.model_type
    if config.hidden_act != "silu":
        raise ModelError(f"hidden_act '{config.hidden_act}' is not supported; only 'silu' is")
    if config.norm_type not in (RMSNORM, LAYERNORM):
        raise ModelError(
            f"norm_type '{config.norm_type}' is not supported; known: {RMSNORM}, {LAYERNORM}"
        )
    if config.norm_type != RMSNORM and not family.chooses_norm:
        raise ModelError(f"model_type '{kind}' has no norm_type switch; a llama has")
    if config.attention_bias and not family.chooses_attention_bias:
        raise ModelError(f"model_type '{kind}' has no attention_bias switch")
    if config.mlp_bias and not family.chooses_mlp_bias:
        raise ModelError(f"model_type '{kind}' has no mlp_bias switch")
    if config.sliding_window is not None:
        if family.window == "none":
            raise ModelError(f"model_type '{kind}' has no sliding_window")
        if config.sliding_window < 1:
            raise ModelError(f"sliding_window must be at least 1, got {config.sliding_window}")
    if not config.layer_types:
        return
    for layer_type in config.layer_types:
        if layer_type not in (FULL, SLIDING):
            raise ModelError(
                f"layer type '{layer_type}' is not supported; known: {FULL}, {SLIDING}"
            )
    if len(config.layer_types) != config.num_hidden_layers:
        raise ModelError(
            f"layer_types has {len(config.layer_types)} entries for "
            f"{config.num_hidden_layers} layers"
        )
    if SLIDING in config.layer_types and config.sliding_window is None:
        raise ModelError(f"layer_types asks for {SLIDING} but sliding_window is off")
    if len(set(config.layer_types)) > 1 and family.window != "layers":
        raise ModelError(f"model_type '{kind}' cannot mix layer types")
