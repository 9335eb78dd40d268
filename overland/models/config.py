"""The config of a dense decoder: one frozen record with Hugging Face's field names, read from and
written to a config.json.

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
from typing import TYPE_CHECKING, Any

from overland.errors import ModelError
from overland.models import sizes
from overland.models.hf_config import (
    FAMILIES,
    FULL,
    LAYERNORM,
    MOST,
    PLAIN,
    RMSNORM,
    SIZES,
    SLIDING,
    Family,
    RopeConfig,
    check_type,
    contents_of,
    keys_of,
    refuse_unknown,
    rope_from_hf,
)
from overland.words import did_you_mean

if TYPE_CHECKING:
    from overland.models.structure import Structure


OPTIONS: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "norm_type": RMSNORM}
"""What the config.json of some families may choose, with the usual value."""


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
        if cls is DecoderConfig:
            return config
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
            hf |= _window_as_hf(self)
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
        if type(self) is DecoderConfig:
            return changed
        # A user's subclass keeps its type and its own fields.
        return replace(self, **{f.name: getattr(changed, f.name) for f in fields(DecoderConfig)})

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every parameter by its Hugging Face name; a tied lm_head is not
        listed."""
        return sizes.parameter_shapes(self)

    def structure(self) -> Structure:
        """Returns the structure of the model. A subclass has its own `build`, which may change the
        blocks."""
        return sizes.decoder_structure(self, plain=type(self) is DecoderConfig)

    def attention_flops(self, seq_len: int, causal: bool) -> float:
        """Returns the training FLOP per token of attention itself; `causal` counts only visible
        keys."""
        windows = [self.window_of(layer) for layer in range(self.num_hidden_layers)]
        keys = sum(_mean_visible_keys(seq_len, window) if causal else seq_len for window in windows)
        return 12 * self.num_attention_heads * self.head_dim * keys

    def activations(self, one: sizes.PassShape) -> sizes.Activations:
        """Returns the memory that a pass takes in addition to parameters and gradients."""
        return sizes.decoder_activations(self, one)

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
        return _described(hf, where)
    except (TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelError(f"{where} is not a valid config.json: {error}") from None


def _described(hf: dict[str, Any], where: str) -> DecoderConfig:
    model_type = hf.get("model_type")
    if model_type is None:
        raise ModelError(f"{where} has no model_type; known: {', '.join(FAMILIES)}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(
            f"{where}: model_type '{model_type}' is not supported; known: {', '.join(FAMILIES)}; "
            "docs/extending.md explains how to add a model of your own"
        )
    refuse_unknown(hf, model_type, where)
    for name in SIZES:
        if hf.get(name) is None:
            raise ModelError(f"{where} has no {name}")
        check_type(DecoderConfig, name, hf[name], where)
        if hf[name] > MOST.get(name, 2**31):
            raise ModelError(f"{where}: {name} = {hf[name]} is unreasonably large")

    family = FAMILIES[model_type]
    values: dict[str, Any] = {"model_type": model_type}
    for name in (*SIZES, *PLAIN, *OPTIONS, "head_dim"):
        value = hf.get(name, family.defaults.get(name))
        if value is not None:
            values[name] = tuple(value) if isinstance(value, list) else value
            check_type(DecoderConfig, name, values[name], where)
    if family.window == "all":
        values["sliding_window"] = hf.get("sliding_window", family.defaults.get("sliding_window"))
        check_type(DecoderConfig, "sliding_window", values["sliding_window"], where)
    if family.window == "layers":
        values |= _window_from_hf(hf)
    try:
        values["rope"] = rope_from_hf(hf, values)
        return DecoderConfig(**values)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from None


def _window_from_hf(hf: dict[str, Any]) -> dict[str, Any]:
    """Reads Qwen's keys: there is a window only if use_sliding_window is true, and then in layers
    >= max_window_layers."""
    given = hf.get("layer_types")
    if not hf.get("use_sliding_window", False):
        # Refused below if it has a sliding layer, harmless if all are full.
        return {"layer_types": tuple(given or ()) if SLIDING in (given or ()) else ()}
    window, first = hf.get("sliding_window", 4096), hf.get("max_window_layers", 28)
    types = given or [
        SLIDING if window is not None and layer >= first else FULL
        for layer in range(hf["num_hidden_layers"])
    ]
    if set(types) == {FULL}:
        return {}
    return {
        "sliding_window": window,
        "layer_types": () if set(types) == {SLIDING} else tuple(types),
    }


def _window_as_hf(config: DecoderConfig) -> dict[str, Any]:
    if config.sliding_window is None:
        return {
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": config.num_hidden_layers,
        }
    window = {"use_sliding_window": True, "sliding_window": config.sliding_window}
    if not config.layer_types:
        return window | {"max_window_layers": 0}
    # Early transformers 4 supported only "from this layer on"; the list is exact.
    first = config.layer_types.index(SLIDING) if SLIDING in config.layer_types else 0
    return window | {"max_window_layers": first, "layer_types": list(config.layer_types)}
