"""config.json in and out (which keys it may hold: hf_keys.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from overland.config.foreign import LARGEST_CONFIG, read_json
from overland.errors import ModelError
from overland.models.config import FAMILIES, FULL, RMSNORM, SLIDING, DecoderConfig, RopeConfig
from overland.models.hf_keys import PLAIN, SIZES, keys_of, refuse_unknown
from overland.words import did_you_mean


def read_config(source: Mapping[str, Any] | str | Path) -> DecoderConfig:
    """A DecoderConfig from a config.json's contents, its path, or the folder that holds it."""
    return _from_dict(*contents_of(source))


def contents_of(source: Mapping[str, Any] | str | Path) -> tuple[dict[str, Any], str]:
    """A config.json's contents, from its path or the folder that holds it, and where it was."""
    if isinstance(source, Mapping):
        return dict(source), "config.json"
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        contents = read_json(path, LARGEST_CONFIG)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ModelError(f"{path} holds a {type(contents).__name__}, expected an object")
    return contents, str(path)


def config_as_hf(config: DecoderConfig) -> dict[str, Any]:
    """config.json contents. Rope is written in both forms: transformers 4 reads only
    `rope_theta` + `rope_scaling`, and tools of the v5 time may read only `rope_parameters`."""
    family = config.family
    hf: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
    }
    for name in (*SIZES, *PLAIN):
        hf[name] = getattr(config, name)
    if isinstance(config.eos_token_id, tuple):
        hf["eos_token_id"] = list(config.eos_token_id)
    if config.model_type != "qwen2" or config.head_dim * config.num_attention_heads != (
        config.hidden_size
    ):
        hf["head_dim"] = config.head_dim
    if family.chooses_attention_bias:
        hf["attention_bias"] = config.attention_bias
    if family.chooses_mlp_bias:
        hf["mlp_bias"] = config.mlp_bias
    if config.norm_type != RMSNORM:  # ours alone, so it is never exported
        hf["norm_type"] = config.norm_type
    if family.window == "all":
        hf["sliding_window"] = config.window_of(0)
    if family.window == "layers":
        hf |= _window_as_hf(config)
    scaling = {key: value for key, value in asdict(config.rope).items() if value is not None}
    hf["rope_parameters"] = dict(scaling)
    hf["rope_theta"] = scaling.pop("rope_theta")
    hf["rope_scaling"] = None if config.rope.rope_type == "default" else scaling
    return hf


def override_config(config: DecoderConfig, overrides: Mapping[str, Any]) -> DecoderConfig:
    """The config with Hugging Face keys replaced; sizes that were derived follow along."""
    overrides = dict(overrides)
    rope = overrides.pop("rope", None)
    if rope is not None:
        rope = asdict(rope) if isinstance(rope, RopeConfig) else dict(rope)
        overrides["rope_parameters"] = {k: v for k, v in rope.items() if v is not None}
    valid = keys_of(config.model_type) | {"rope"}
    for name in overrides:
        if name not in valid:
            raise ModelError(
                f"'{name}' is not a field of a {config.model_type} model{did_you_mean(name, valid)}"
            )
    hf = config_as_hf(config)
    del hf["rope_parameters"]  # the old form carries everything, and one form is easier to replace
    if "rope_parameters" in overrides:
        del hf["rope_theta"], hf["rope_scaling"]
    ungrouped = config.num_key_value_heads == config.num_attention_heads
    if ungrouped and "num_attention_heads" in overrides:
        hf["num_key_value_heads"] = None
    derived = config.head_dim * config.num_attention_heads == config.hidden_size
    resized = bool({"hidden_size", "num_attention_heads"} & overrides.keys())
    if derived and resized and config.model_type != "qwen3":
        hf.pop("head_dim", None)
    if {"use_sliding_window", "max_window_layers", "layer_types"} & overrides.keys():
        hf.pop("layer_types", None)
    changed = _from_dict(hf | overrides, "the overridden model")
    if type(config) is DecoderConfig:
        return changed
    # A user's subclass stays what it is, with fields of its own.
    return replace(config, **{f.name: getattr(changed, f.name) for f in fields(DecoderConfig)})


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# What transformers' config classes assume where a key is absent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
}


def _from_dict(hf: dict[str, Any], where: str) -> DecoderConfig:
    try:
        return _described(hf, where)
    except (TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelError(f"{where} holds something else than a config.json: {error}") from None


def _described(hf: dict[str, Any], where: str) -> DecoderConfig:
    model_type = hf.get("model_type")
    if model_type is None:
        raise ModelError(f"{where} has no model_type; known: {', '.join(FAMILIES)}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ModelError(
            f"{where}: model_type '{model_type}' is not supported; known: {', '.join(FAMILIES)}"
        )
    refuse_unknown(hf, model_type, where)
    for name in SIZES:
        if hf.get(name) is None:
            raise ModelError(f"{where} has no {name}")
        check_type(DecoderConfig, name, hf[name], where)
        if hf[name] > MOST.get(name, 2**31):
            raise ModelError(f"{where}: {name} = {hf[name]} is beyond any model")

    family, defaults = FAMILIES[model_type], _DEFAULTS[model_type]
    values: dict[str, Any] = {"model_type": model_type}
    for name in (*SIZES, *PLAIN, "attention_bias", "mlp_bias", "head_dim", "norm_type"):
        value = hf.get(name, defaults.get(name))
        if value is not None:
            values[name] = tuple(value) if isinstance(value, list) else value
            check_type(DecoderConfig, name, values[name], where)
    if family.window == "all":
        values["sliding_window"] = hf.get("sliding_window", defaults.get("sliding_window"))
        check_type(DecoderConfig, "sliding_window", values["sliding_window"], where)
    if family.window == "layers":
        values |= _window_from_hf(hf)
    try:
        values["rope"] = _rope_from_hf(hf, values)
        return DecoderConfig(**values)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from None


# Built one by one, so that a number beyond reason would take hours and all memory.
MOST = {"num_hidden_layers": 100_000}
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "None": (type(None),),
}


def check_type(owner: type, name: str, value: Any, where: str) -> None:
    """JSON says "32" and 32 as easily; only one of them is a size."""
    (expected,) = (str(item.type) for item in fields(owner) if item.name == name)
    for one in expected.split(" | "):
        inner = re.fullmatch(r"tuple\[(\w+), \.\.\.\]", one)
        if inner and isinstance(value, tuple) and all(type(v) in _TYPES[inner[1]] for v in value):
            return
        if one in _TYPES and type(value) in _TYPES[one]:
            return
    raise ModelError(f"{where}: {name} = {value!r:.100} is not of type {expected}")


def _rope_from_hf(hf: dict[str, Any], values: dict[str, Any]) -> RopeConfig:
    # As transformers 5 does: rope_scaling wins over rope_parameters, a theta inside wins over
    # one outside.
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ModelError(f"rope_scaling = {rope!r:.100} is no object")
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


def _window_from_hf(hf: dict[str, Any]) -> dict[str, Any]:
    """Qwen: a window only where use_sliding_window is true, then in layers >= max_window_layers."""
    given = hf.get("layer_types")
    if not hf.get("use_sliding_window", False):
        # Refused below if it names a sliding layer, harmless if it says "full" everywhere.
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
    # transformers 4 before layer_types knew only "from this layer on"; the list is exact.
    first = config.layer_types.index(SLIDING) if SLIDING in config.layer_types else 0
    return window | {"max_window_layers": first, "layer_types": list(config.layer_types)}
