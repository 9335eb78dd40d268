"""The config of a dense decoder (from and to config.json), and the parameter shapes, attention FLOP
and activation memory that follow from it. It is one frozen record with Hugging Face's field names.

The families differ only by options, never by copies of the model:

| model_type | qkv bias | o_proj bias | mlp bias | qk-norm | sliding window | head_dim |
|---|---|---|---|---|---|---|
| llama   | attention_bias | attention_bias | mlp_bias | no  | no                     | free |
| mistral | no             | no             | no       | no  | every layer, or none   | free |
| qwen2   | always         | no             | no       | no  | chosen layers, or none | free |
| qwen3   | attention_bias | attention_bias | no       | yes | chosen layers, or none | free |

One option is not Hugging Face's: a llama may have `norm_type = "layernorm"`, LayerNorm with a
weight and no bias, as in older torchtitan. No config.json can express it for transformers, so such
a model is not exported.

Does not import torch, so that the config package and `--help` stay fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from overland.errors import ModelError
from overland.models.hf_config import (
    FAMILIES,
    FULL,
    LAYERNORM,
    OPTIONS,
    PLAIN,
    RMSNORM,
    SIZES,
    SLIDING,
    Family,
    RopeConfig,
    contents_of,
    keys_of,
    rope_from_hf,
    values_of,
    window_as_hf,
)
from overland.models.structure import Activations, PassShape, Role, Structure
from overland.words import did_you_mean

# Tokens whose logits exist at a time (see loss.py): if they are converted to float32 in memory, and
# if a kernel does everything in place.
CHUNK_TOKENS = 2048
KERNEL_CHUNK_TOKENS = 8192

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ROLES = {
    "model.embed_tokens": Role.VOCABULARY,
    "self_attn.q_proj": Role.COLUMN,
    "self_attn.k_proj": Role.COLUMN,
    "self_attn.v_proj": Role.COLUMN,
    "self_attn.o_proj": Role.ROW,
    "mlp.gate_proj": Role.COLUMN,
    "mlp.up_proj": Role.COLUMN,
    "mlp.down_proj": Role.ROW,
    "lm_head": Role.VOCABULARY,
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
    # FULL or SLIDING for each layer; empty means the same for all layers (SLIDING if there is a
    # window), so that overriding num_hidden_layers takes a single key.
    layer_types: tuple[str, ...] = ()
    rope: RopeConfig = field(default_factory=RopeConfig)
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> DecoderConfig:
        """Reads a config.json, given as its contents, its path, or the folder that holds it."""
        config = _from_dict(*contents_of(source))
        # A user's subclass is built by its own function, so its type must be kept.
        return cls(**{item.name: getattr(config, item.name) for item in fields(DecoderConfig)})

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json of this model. RoPE is written in both forms: transformers 4
        reads only `rope_theta` and `rope_scaling`, and newer tools may read only
        `rope_parameters`."""
        family = self.family
        hf: dict[str, Any] = {"architectures": [family.architecture]}
        hf["model_type"] = self.model_type
        for name in (*SIZES, *PLAIN):
            hf[name] = getattr(self, name)
        if isinstance(self.eos_token_id, tuple):
            hf["eos_token_id"] = list(self.eos_token_id)
        is_derived = self.head_dim * self.num_attention_heads == self.hidden_size
        if self.model_type != "qwen2" or not is_derived:
            hf["head_dim"] = self.head_dim
        for name in family.options:
            if name != "norm_type" or self.norm_type != RMSNORM:  # which is only in Overland
                hf[name] = getattr(self, name)
        if family.window == "all":
            hf["sliding_window"] = self.window_of(0)
        if family.window == "layers":
            hf |= window_as_hf(self.sliding_window, self.layer_types, self.num_hidden_layers)
        scaling = {key: value for key, value in asdict(self.rope).items() if value is not None}
        hf["rope_parameters"] = dict(scaling)
        hf["rope_theta"] = scaling.pop("rope_theta")
        hf["rope_scaling"] = None if self.rope.rope_type == "default" else scaling
        return hf

    def override(self, overrides: Mapping[str, Any]) -> DecoderConfig:
        """Returns this config with some Hugging Face keys replaced, and derived sizes updated;
        raises a ModelError for an unknown key."""
        overrides = dict(overrides)
        rope = overrides.pop("rope", None)
        if rope is not None:
            rope = asdict(rope) if isinstance(rope, RopeConfig) else dict(rope)
            overrides["rope_parameters"] = {k: v for k, v in rope.items() if v is not None}
        valid = keys_of(self.model_type) | {"rope"}
        for name in overrides:
            if name not in valid:
                near = did_you_mean(name, valid)
                raise ModelError(f"'{name}' is not a field of a {self.model_type} model{near}")
        hf = DecoderConfig.to_hf(self)  # a subclass may write keys of its own
        del hf["rope_parameters"]  # the old form has everything, and one form is easier to replace
        if "rope_parameters" in overrides:
            del hf["rope_theta"], hf["rope_scaling"]
        ungrouped = self.num_key_value_heads == self.num_attention_heads
        if ungrouped and "num_attention_heads" in overrides:
            hf["num_key_value_heads"] = None
        derived = self.head_dim * self.num_attention_heads == self.hidden_size
        resized = bool({"hidden_size", "num_attention_heads"} & overrides.keys())
        if derived and resized and self.model_type != "qwen3":
            hf.pop("head_dim", None)
        if {"use_sliding_window", "max_window_layers", "layer_types"} & overrides.keys():
            hf.pop("layer_types", None)
        changed = _from_dict(hf | overrides, "the overridden model")
        # A user's subclass keeps its type and its own fields.
        return replace(self, **{f.name: getattr(changed, f.name) for f in fields(DecoderConfig)})

    def matrices(self) -> dict[str, tuple[int, int, bool]]:
        """Returns the linear layers of a block: outputs, inputs, and whether there is a bias."""
        width, inner = self.hidden_size, self.intermediate_size
        q_width = self.num_attention_heads * self.head_dim
        kv_width = self.num_key_value_heads * self.head_dim
        qkv_bias = self.family.qkv_bias or self.attention_bias
        return {
            "self_attn.q_proj": (q_width, width, qkv_bias),
            "self_attn.k_proj": (kv_width, width, qkv_bias),
            "self_attn.v_proj": (kv_width, width, qkv_bias),
            "self_attn.o_proj": (width, q_width, self.attention_bias),
            "mlp.gate_proj": (inner, width, self.mlp_bias),
            "mlp.up_proj": (inner, width, self.mlp_bias),
            "mlp.down_proj": (width, inner, self.mlp_bias),
        }

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every parameter by its Hugging Face name, in the order of the
        forward pass; a tied lm_head is not listed again."""
        vocab, width = self.vocab_size, self.hidden_size
        layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (width,)}
        for name, (rows, columns, has_bias) in self.matrices().items():
            layer[f"{name}.weight"] = (rows, columns)
            if has_bias:
                layer[f"{name}.bias"] = (rows,)
        if self.qk_norm:
            layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (self.head_dim,)
        layer["post_attention_layernorm.weight"] = (width,)
        layers = {
            f"model.layers.{number}.{name}": shape
            for number in range(self.num_hidden_layers)
            for name, shape in layer.items()
        }
        head = {} if self.tie_word_embeddings else {HEAD: (vocab, width)}
        return {EMBEDDING: (vocab, width), **layers, "model.norm.weight": (width,), **head}

    def structure(self) -> Structure:
        """Returns the structure of the model. A subclass has its own `build`, which may change the
        blocks."""
        is_plain = type(self) is DecoderConfig
        return Structure(
            blocks=("model.layers",),
            first_stage=("model.embed_tokens",),
            last_stage=("model.norm", "lm_head"),
            ties={HEAD: EMBEDDING} if self.tie_word_embeddings else {},
            between=lambda tokens: (tokens, self.hidden_size),
            roles=ROLES,
            compiled=("model.norm",),
            random=not is_plain,
            # Masks of windows are built in every pass, and have not been tested with CUDA graphs.
            recordable=is_plain and self.sliding_window is None,
        )

    def attention_flops(self, seq_len: int, causal: bool) -> float:
        """Returns the training FLOP per token of attention itself; `causal` counts only visible
        keys."""
        windows = [self.window_of(layer) for layer in range(self.num_hidden_layers)]
        keys = sum(_mean_visible_keys(seq_len, window) if causal else seq_len for window in windows)
        return 12 * self.num_attention_heads * self.head_dim * keys

    def activations(self, one: PassShape) -> Activations:
        """Returns the memory that a pass takes in addition to parameters and gradients."""
        size, tp, tokens = one.size, one.tp, one.tokens
        matrix = self.vocab_size * self.hidden_size / tp
        hidden = tokens * self.hidden_size * size / tp
        kept = self._kept_per_token(one)
        whole = self._kept_per_token(replace(one, recompute="none"))
        trained = matrix if one.trains_head else 0.0
        vocab = self.vocab_size / tp
        chunk = min(tokens, CHUNK_TOKENS) * vocab
        # Logits, and the gradient of the output matrix: accumulated in float32, then scaled and
        # rounded, when no logits are left.
        if tp > 1:  # The rows are gathered, and their gradient is wide until it is summed.
            before = 4 * trained if tokens > CHUNK_TOKENS else 0.0
            loss = max(
                chunk * (size + 4) + before, chunk * size + 4 * trained, (4 + size) * trained
            )
            loss += tokens * self.hidden_size * (size + 4)
        elif one.kernels:
            logits = min(tokens, KERNEL_CHUNK_TOKENS) * vocab * size
            loss = 4 * trained + max(logits, size * trained)
        else:
            loss = 4 * trained + max(chunk * (size + 8), (4 + size) * trained)
        return Activations(
            kept=tokens * kept,
            # Gradients of gate, up and their product; what is recomputed.
            block=tokens * (3 * size * self.intermediate_size / tp + whole - kept) + 2 * hidden,
            # The last norm's input and output, and the gradient of the latter.
            head=loss + 3 * hidden,
        )

    def _kept_per_token(self, one: PassShape) -> float:
        """Returns the bytes per token and block that are kept for its backward pass."""
        size, tp = one.size, one.tp
        width, inner = self.hidden_size, self.intermediate_size / tp
        q = self.num_attention_heads * self.head_dim / tp
        kv = self.num_key_value_heads * self.head_dim / tp
        if one.recompute == "full":
            return size * width / tp
        # Queries, keys, values, the output, and a number per head; gate and up.
        outputs = size * (2 * q + 2 * kv * one.cp + 2 * inner)
        outputs += 4 * self.num_attention_heads / tp
        residuals = size * 2 * width / tp
        if one.recompute == "selective":
            return outputs + residuals + (0 if one.compiled else size * width / tp)

        if not one.float8:  # both norms' outputs, and silu(gate) · up
            inputs = size * (2 * width + inner)
        else:  # in 8 bits, attention's output as well; uncompiled, each product casts separately
            inputs = (2 if one.compiled else 5) * width + inner + q
        if one.cp > 1:  # the outputs of a head and a tail piece, joined
            inputs += size * q
        if self.qk_norm:
            outputs += size * (q + kv)
        if not one.compiled:  # norms keep a float32 and a rounded input; silu(gate) is also kept
            residuals = 2 * (4 + size) * width / tp
            outputs += size * inner
        return outputs + residuals + inputs

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def qk_norm(self) -> bool:
        return self.family.qk_norm

    def window_of(self, layer: int) -> int | None:
        """Returns the sliding window of a layer; None if it sees everything before it."""
        if self.layer_types and self.layer_types[layer] == FULL:
            return None
        return self.sliding_window

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES:
            raise ModelError(
                f"model_type '{self.model_type}' is not supported; known: {', '.join(FAMILIES)}"
            )
        # The class is frozen, so derived sizes are set through object.__setattr__.
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
    for name in (*SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings"):
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
    for name, usual in OPTIONS.items():
        if getattr(config, name) != usual and name not in family.options:
            raise ModelError(f"model_type '{kind}' has no {name} option")
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
        raise ModelError(f"layer_types has {SLIDING}, but sliding_window is off")
    if len(set(config.layer_types)) > 1 and family.window != "layers":
        raise ModelError(f"model_type '{kind}' cannot mix layer types")


def _from_dict(hf: dict[str, Any], where: str) -> DecoderConfig:
    try:
        values = values_of(hf, where, DecoderConfig)
        try:
            return DecoderConfig(**values, rope=rope_from_hf(hf, values))
        except ModelError as error:
            raise ModelError(f"{where}: {error}") from None
    except (TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelError(f"{where} is not a valid config.json: {error}") from None
