"""Hugging Face's model families: which keys their config.json may have, their defaults, and which
are refused; also the keys of rotary embeddings.

A key that Overland does not know may change the mathematics (Granite's multipliers, Gemma's
soft-caps, a MoE's experts), and silently dropping it would train a wrong model for weeks. So
unknown keys are errors unless their value is null. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from overland.errors import ModelError
from overland.files import LARGEST_CONFIG, read_object

FULL, SLIDING = "full_attention", "sliding_attention"
RMSNORM, LAYERNORM = "rmsnorm", "layernorm"

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)

PLAIN = (
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "hidden_act",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)

OPTIONS: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "norm_type": RMSNORM}
"""What the config.json of some families may choose, with the usual value."""

# Layers are built one by one, so an absurd number would take hours and all memory.
MOST = {"num_hidden_layers": 100_000}


@dataclass(frozen=True)
class Family:
    """What a model_type determines, and what its config.json may choose."""

    architecture: str
    defaults: Mapping[str, Any]
    """Values of absent keys, as in transformers' config class."""
    options: tuple[str, ...] = ()
    """Those of attention_bias, mlp_bias and norm_type that it may choose."""
    qk_norm: bool = False
    qkv_bias: bool = False  # always on, whatever config.json says
    window: str = "none"  # "none" | "all" (every layer or no layer) | "layers" (any subset)


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        options=("attention_bias", "mlp_bias", "norm_type"),
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        window="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {"num_key_value_heads": 32, "max_position_embeddings": 32768},
        qkv_bias=True,
        window="layers",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
        options=("attention_bias",),
        qk_norm=True,
        window="layers",
    ),
}


def values_of(hf: dict[str, Any], where: str, owner: type) -> dict[str, Any]:
    """Returns the fields of `owner`, the class of a decoder's config, that a config.json gives; all
    but `rope`."""
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
        check_type(owner, name, hf[name], where)
        if hf[name] > MOST.get(name, 2**31):
            raise ModelError(f"{where}: {name} = {hf[name]} is unreasonably large")

    family = FAMILIES[model_type]
    values: dict[str, Any] = {"model_type": model_type}
    for name in (*SIZES, *PLAIN, *OPTIONS, "head_dim"):
        value = hf.get(name, family.defaults.get(name))
        if value is not None:
            values[name] = tuple(value) if isinstance(value, list) else value
            check_type(owner, name, values[name], where)
    if family.window == "all":
        values["sliding_window"] = hf.get("sliding_window", family.defaults.get("sliding_window"))
        check_type(owner, "sliding_window", values["sliding_window"], where)
    if family.window == "layers":
        values |= _window_from_hf(hf)
    return values


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


def window_as_hf(
    sliding_window: int | None, layer_types: Sequence[str], num_hidden_layers: int
) -> dict[str, Any]:
    if sliding_window is None:
        return {
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": num_hidden_layers,
        }
    window = {"use_sliding_window": True, "sliding_window": sliding_window}
    if not layer_types:
        return window | {"max_window_layers": 0}
    # Early transformers 4 supported only "from this layer on"; the list is exact.
    first = layer_types.index(SLIDING) if SLIDING in layer_types else 0
    return window | {"max_window_layers": first, "layer_types": list(layer_types)}


def contents_of(source: Mapping[str, Any] | str | Path) -> tuple[dict[str, Any], str]:
    """Returns the contents of a config.json, given its path or the folder that holds it, and its
    path."""
    if isinstance(source, Mapping):
        return dict(source), "config.json"
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    return read_object(path, ModelError, LARGEST_CONFIG), str(path)


def keys_of(model_type: str) -> set[str]:
    """Returns the keys of a family's config.json that describe the model."""
    family = FAMILIES[model_type]
    window = _WINDOW_KEYS[family.window]
    return {"model_type", "head_dim", *SIZES, *PLAIN, *_ROPE_KEYS, *family.options, *window}


def refuse_unknown(hf: dict[str, Any], model_type: str, where: str) -> None:
    known = keys_of(model_type)
    for name, value in hf.items():
        if name in known or name in _HARMLESS or name.startswith("_") or value is None:
            continue
        if name in _ONLY:
            if value not in _ONLY[name]:
                raise ModelError(f"{where}: {name} = {value!r} is not supported")
            continue
        if name == "layer_types" and set(value) == {FULL}:
            continue
        if name in _REASONS:
            raise ModelError(f"{where}: {name} is not supported: {_REASONS[name]}")
        raise ModelError(
            f"{where}: key '{name}' = {_short(value)} is not known for model_type '{model_type}' "
            "and may change what the model computes"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_type(owner: type, name: str, value: Any, where: str) -> None:
    """Raises if a value has the wrong type: JSON may hold "32" instead of 32, and only one is a
    size."""
    try:
        TypeAdapter(get_type_hints(owner)[name]).validate_python(value, strict=True)
    except ValidationError:
        (expected,) = (str(item.type) for item in fields(owner) if item.name == name)
        raise ModelError(f"{where}: {name} = {value!r:.100} is not of type {expected}") from None


# Type of a rotary embedding → the numbers that it needs, and further ones that it may have.
ROPE_NUMBERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    # Some exporters write the second; the rule itself reads max_position_embeddings.
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (
        ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        (),
    ),
}


@dataclass(frozen=True)
class RopeConfig:
    """A rotary embedding: its type and its numbers; those that a type does not use stay None."""

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
        if self.rope_type not in ROPE_NUMBERS:
            raise ModelError(
                f"rope_type '{self.rope_type}' is not supported; known types: "
                f"{', '.join(ROPE_NUMBERS)}"
            )
        if not 0 < self.rope_theta < math.inf:
            raise ModelError(f"rope_theta must be positive, got {self.rope_theta}")
        needed, optional = ROPE_NUMBERS[self.rope_type]
        for item in fields(self):
            if item.name in ("rope_type", "rope_theta"):
                continue
            value = getattr(self, item.name)
            if value is None and item.name in needed:
                raise ModelError(f"rope_type '{self.rope_type}' needs {item.name}, which is absent")
            if value is not None and not math.isfinite(value):
                raise ModelError(f"rope's {item.name} must be a finite number, got {value}")
            if value is not None and item.name not in (*needed, *optional):
                raise ModelError(f"rope_type '{self.rope_type}' has no {item.name} (got {value})")
        if self.factor is not None and self.factor < 1:
            raise ModelError(f"rope factor must be at least 1, got {self.factor}")


def rope_from_hf(hf: dict[str, Any], values: dict[str, Any]) -> RopeConfig:
    # As transformers 5 does: rope_scaling wins over rope_parameters, a theta inside wins over
    # one outside.
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ModelError(f"rope_scaling = {rope!r:.100} is not an object")
    rope = dict(rope)
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError("rope_parameters per layer type are not supported")
    old_type = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or old_type or "default"
    if rope.pop("partial_rotary_factor", None) not in (None, 1, 1.0):
        raise ModelError("partial_rotary_factor other than 1 is not supported")
    given = (rope.pop("rope_theta", None), hf.get("rope_theta"), 10000.0)
    theta = next(value for value in given if value is not None)
    known = {item.name for item in fields(RopeConfig)}
    for name, value in rope.items():
        if name not in known and value is not None:
            raise ModelError(f"rope key '{name}' = {value!r} is not supported")
    if kind in ("yarn", "llama3"):
        default = values.get("max_position_embeddings")
        rope["original_max_position_embeddings"] = (
            rope.get("original_max_position_embeddings") or default
        )
    numbers = {name: value for name, value in rope.items() if name in known}
    for name, value in {"rope_type": kind, "rope_theta": theta, **numbers}.items():
        check_type(RopeConfig, name, value, "rope")
    return RopeConfig(rope_type=kind, rope_theta=float(theta), **numbers)


_ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
_WINDOW_KEYS: dict[str, tuple[str, ...]] = {
    "none": (),
    "all": ("sliding_window",),
    "layers": ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
}

_MOE = "mixtures of experts are not implemented yet"
_REASONS = {
    "quantization_config": "load the unquantized weights",
    "auto_map": "the repository brings its own model code",
    "num_experts": _MOE,
    "num_local_experts": _MOE,
    "num_experts_per_tok": _MOE,
    "n_routed_experts": _MOE,
    "moe_intermediate_size": _MOE,
}

# Keys that change the mathematics unless they hold one of these values.
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0,),
    "hidden_dropout": (0,),
    "resid_pdrop": (0,),
    "embd_pdrop": (0,),
    "partial_rotary_factor": (1,),
    "use_mrope": (False,),
    "is_encoder_decoder": (False,),
    "is_causal": (True,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}

# Bookkeeping, generation defaults and hints to the runtime: none changes the forward pass.
_HARMLESS_KEYS = """
    architectures transformers_version torch_dtype dtype use_cache name_or_path use_bfloat16
    pretraining_tp unsloth_fixed unsloth_version model_name task_specific_params
    return_dict output_hidden_states output_attentions torchscript is_decoder tf_legacy_loss
    chunk_size_feed_forward cross_attention_hidden_size tie_encoder_decoder finetuning_task
    id2label label2id num_labels problem_type tokenizer_class prefix sep_token_id
    decoder_start_token_id mask_token_id cls_token_id begin_suppress_tokens suppress_tokens
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty attn_implementation max_sequence_length is_llama_config
    transformers.js_config
"""
_HARMLESS = frozenset(_HARMLESS_KEYS.split())
