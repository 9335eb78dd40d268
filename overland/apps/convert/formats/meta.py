"""Reads and writes Meta's Llama folders (`consolidated.NN.pth` and `params.json`), and translates
Meta's tensor names and order of rotary rows, which torchtitan also uses.

Meta rotates neighboring rows of a head (0 with 1, 2 with 3, …); Hugging Face rotates row i with
row i + half. Both compute the same if the rows of wq and wk are ordered accordingly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from overland.apps.convert.formats.lazy import (
    Changed,
    Config,
    LazyCheckpoint,
    Options,
    Stored,
    Tiled,
    copy_files,
    is_computed,
    split_state,
    write_json,
)
from overland.apps.convert.formats.torch_save import read_torch_file, tensors_in, write_torch_file
from overland.checkpoint.lazy import MODEL, OPTIMIZER, Lazy, Shape
from overland.errors import CheckpointError
from overland.files import new_file, read_object

PARAMS = "params.json"

# Meta's names, and ours; N is the number of a layer.
_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "layers.N.attention.wq.weight": "model.layers.N.self_attn.q_proj.weight",
    "layers.N.attention.wk.weight": "model.layers.N.self_attn.k_proj.weight",
    "layers.N.attention.wv.weight": "model.layers.N.self_attn.v_proj.weight",
    "layers.N.attention.wo.weight": "model.layers.N.self_attn.o_proj.weight",
    "layers.N.feed_forward.w1.weight": "model.layers.N.mlp.gate_proj.weight",
    "layers.N.feed_forward.w2.weight": "model.layers.N.mlp.down_proj.weight",
    "layers.N.feed_forward.w3.weight": "model.layers.N.mlp.up_proj.weight",
    "layers.N.attention_norm.weight": "model.layers.N.input_layernorm.weight",
    "layers.N.ffn_norm.weight": "model.layers.N.post_attention_layernorm.weight",
}
NOT_META = "is not a parameter of a dense Llama in Meta's names"
_META_NAMES = {ours: metas for metas, ours in _NAMES.items()}
_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")

# Whether Meta's shards of a matrix are stacked vertically or side by side.
_COLUMNS = re.compile(r"\.(wq|wk|wv|w1|w3)\.weight$|^output\.weight$")
_ROWS = re.compile(r"\.(wo|w2)\.weight$")


def detect_meta(path: Path) -> bool:
    return (path / PARAMS).is_file() and any(path.glob("consolidated.*.pth"))


def open_meta(path: Path, config: Config = None) -> LazyCheckpoint:
    params = read_object(path / PARAMS, CheckpointError)
    shards = [
        tensors_in(read_torch_file(file), file) for file in sorted(path.glob("consolidated.*.pth"))
    ]
    whole = {
        name: _merged(name, [shard[name] for shard in shards], params, path)
        for name in shards[0]
        if not is_computed(name)
    }
    try:
        config = config or _config(params, whole)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path / PARAMS} does not describe a Llama: {error!r}") from None
    weights = to_hf_names(whole, head_dim_of(config, str(path)))
    tensors = {MODEL + name: lazy for name, lazy in weights.items()}
    return LazyCheckpoint("meta", path, tensors, config=config)


def write_meta(source: LazyCheckpoint, folder: Path, options: Options) -> None:
    head_dim = head_dim_of(source.config, "writing Meta's format")
    config = source.config or {}
    check_is_plain_llama(config, "Meta's format")
    weights = {name: lazy for name, lazy in source.tensors.items() if name.startswith(MODEL)}
    embedding, head = f"{MODEL}model.embed_tokens.weight", f"{MODEL}lm_head.weight"
    if config.get("tie_word_embeddings") and embedding in weights:
        weights[head] = weights[embedding]  # Meta's model always has an output matrix
    named = {n.removeprefix(MODEL): lazy for n, lazy in to_meta_names(weights, head_dim).items()}
    with new_file(folder / "consolidated.00.pth") as file:
        write_torch_file(file, named, root="consolidated.00")
    write_json(folder / PARAMS, _params(config))
    copy_files((file for file in source.companions if "tokenizer" in file.name), folder)


def _merged(name: str, shards: list[Stored], params: dict[str, Any], path: Path) -> Lazy:
    """Joins the shards of a tensor: side by side, one below the other, or all the same."""
    first = shards[0]
    is_embedding = name == "tok_embeddings.weight"
    if len(shards) == 1 or not (is_embedding or _COLUMNS.search(name) or _ROWS.search(name)):
        return first
    dim = 1 if _ROWS.search(name) else 0
    if is_embedding:  # Llama 2 splits the width, Llama 3 the vocabulary
        dim = 0 if first.shape[1] == params.get("dim") else 1
    tiles: list[tuple[Shape, Lazy]] = []
    place = 0
    for shard in shards:
        if shard.dtype != first.dtype or shard.shape[1 - dim] != first.shape[1 - dim]:
            raise CheckpointError(f"{path}: the shards of {name} do not fit together")
        tiles.append(((place, 0) if dim == 0 else (0, place), shard))
        place += shard.shape[dim]
    shape = (place, first.shape[1]) if dim == 0 else (first.shape[0], place)
    return Tiled(shape, first.dtype, tiles)


def _config(params: dict[str, Any], tensors: dict[str, Lazy]) -> dict[str, Any]:
    """Returns the config.json of the model. Sizes come from the tensors, since Llama 2 has
    vocab_size -1."""
    width, heads = int(params["dim"]), int(params["n_heads"])
    kv_heads = int(params.get("n_kv_heads") or heads)
    vocab_size = tensors["tok_embeddings.weight"].shape[0]
    theta = float(params.get("rope_theta", 10000.0))
    rows = tensors["layers.0.attention.wk.weight"].shape[0]
    if rows != kv_heads * (width // heads):
        raise CheckpointError(
            f"wk has {rows} rows in total, expected {kv_heads} heads of {width // heads}"
        )
    is_third = theta >= 500000 or vocab_size >= 128000
    scaled = bool(params.get("use_scaled_rope"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": int(params["n_layers"]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width // heads,
        "intermediate_size": tensors["layers.0.feed_forward.w1.weight"].shape[0],
        "vocab_size": vocab_size,
        "rms_norm_eps": float(params.get("norm_eps", 1e-5)),
        "hidden_act": "silu",
        "rope_theta": theta,
        "rope_scaling": _scaling(params, width) if scaled else None,
        # Not in params.json; these are the lengths that each generation was trained for.
        "max_position_embeddings": 131072 if scaled else 8192 if is_third else 4096,
        "bos_token_id": 128000 if vocab_size >= 128002 else 1,
        "eos_token_id": 128001 if vocab_size >= 128002 else 2,
        "tie_word_embeddings": "output.weight" not in tensors,
    }


def _scaling(params: dict[str, Any], width: int) -> dict[str, Any]:
    """Returns Llama 3.1's RoPE scaling, which is in Meta's code but not in params.json. Hugging
    Face has factor 32 for the 3.2 models, which are those with a width of 2048 or 3072."""
    return {
        "rope_type": "llama3",
        "factor": float(params.get("rope_scaling_factor") or (32 if width in (2048, 3072) else 8)),
        "low_freq_factor": 1.0,
        "high_freq_factor": float(params.get("rope_high_freq_factor") or 4.0),
        "original_max_position_embeddings": 8192,
    }


def _params(config: dict[str, Any]) -> dict[str, Any]:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    multiplier, multiple = _feed_forward(width, config["intermediate_size"])
    params = {
        "dim": width,
        "n_layers": config["num_hidden_layers"],
        "n_heads": heads,
        "n_kv_heads": config.get("num_key_value_heads") or heads,
        "vocab_size": config["vocab_size"],
        "multiple_of": multiple,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": float(theta),
    }
    if multiplier is not None:
        params["ffn_dim_multiplier"] = multiplier
    if rope.get("rope_type", rope.get("type")) == "llama3":
        params["use_scaled_rope"] = True
        if rope["factor"] != _scaling({}, width)["factor"]:
            params["rope_scaling_factor"] = rope["factor"]
    return params


def feed_forward_size(width: int, multiplier: float | None, multiple: int) -> int:
    """Returns the width of the feed-forward layers, as Meta's model computes it."""
    size = int(2 * 4 * width / 3)
    if multiplier is not None:
        size = int(multiplier * size)
    return multiple * ((size + multiple - 1) // multiple)


def _feed_forward(width: int, wanted: int) -> tuple[float | None, int]:
    """Returns a multiplier and a multiple that give the wanted size, trying those of known models
    first."""
    known = [None, 1.3, 1.5, 1.4, 1.2, 1.1]
    for multiple in (256, 1024, 4096, 512, 128, 64, 32, 16):
        for multiplier in known:
            if feed_forward_size(width, multiplier, multiple) == wanted:
                return multiplier, multiple
    multiple = math.gcd(wanted, 256)
    multiplier = (wanted - multiple / 2) / int(2 * 4 * width / 3)
    assert feed_forward_size(width, multiplier, multiple) == wanted
    return multiplier, multiple


def has_meta_names(names: Iterable[str]) -> bool:
    return "tok_embeddings.weight" in set(names)


def meta_name(name: str) -> str:
    reason = "has no counterpart in Meta's Llama, so this model cannot be written in Meta's or"
    return _translated(name, _META_NAMES, f"{reason} torchtitan's names")


def _translated(name: str, names: dict[str, str], refusal: str) -> str:
    layer, plain = _LAYER.search(name), _LAYER.sub("N", name, count=1)
    if plain not in names:
        raise CheckpointError(f"{name} {refusal}")
    return names[plain].replace("N", layer[0]) if layer else names[plain]


def to_hf_names(tensors: Mapping[str, Lazy], head_dim: int) -> dict[str, Lazy]:
    """Converts weights from Meta's names and row order to Hugging Face's."""
    renamed: dict[str, Lazy] = {}
    for name, tensor in tensors.items():
        if not is_computed(name):
            plain = _translated(name, _NAMES, NOT_META)
            renamed[plain] = _reordered(plain, tensor, head_dim, (head_dim // 2, 2))
    return renamed


def to_meta_names(tensors: Mapping[str, Lazy], head_dim: int) -> dict[str, Lazy]:
    """Converts a run's entries to Meta's names and row order: `layers.0…`,
    `optimizer.layers.0….exp_avg`."""
    renamed: dict[str, Lazy] = {}
    split = 2, head_dim // 2
    for name, tensor in tensors.items():
        state = split_state(name, tensors)
        if state is not None:
            rows = _reordered(state[0], tensor, head_dim, split)
            renamed[f"{OPTIMIZER}{meta_name(state[0])}.{state[1]}"] = rows
        elif name.startswith(MODEL):
            plain = name.removeprefix(MODEL)
            renamed[MODEL + meta_name(plain)] = _reordered(plain, tensor, head_dim, split)
        else:
            renamed[name] = tensor
    return renamed


def head_dim_of(config: Mapping[str, Any] | None, why: str) -> int:
    """Returns the number of rows per head, which is needed to reorder rows."""
    if config is None:
        raise CheckpointError(
            f"{why} needs the model's config.json to reorder rotary rows; give it with --config"
        )
    given = config.get("head_dim")
    return int(given or config["hidden_size"] // config["num_attention_heads"])


def check_is_plain_llama(config: Mapping[str, Any], target: str) -> None:
    """Raises if the model differs from Meta's Llama, which has no options for other families or
    newer features."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    heads, width = config["num_attention_heads"], config["hidden_size"]
    problem = None
    if config.get("model_type") != "llama":
        problem = f"model_type is {config.get('model_type')}"
    elif config.get("attention_bias") or config.get("mlp_bias"):
        problem = "it has biases"
    elif heads * (config.get("head_dim") or width // heads) != width:
        problem = "its heads do not add up to hidden_size"
    elif kind not in ("default", "llama3"):
        problem = f"its rope_type is {kind}"
    if problem is not None:
        raise CheckpointError(
            f"{target} supports only plain Llama models, but for this one {problem}"
        )


def _reordered(name: str, tensor: Lazy, head_dim: int, split: tuple[int, int]) -> Lazy:
    """Returns a tensor, given by its Hugging Face name, with the rows of each head, seen as a
    table of this shape, transposed."""
    if not re.search(r"self_attn\.[qk]_proj\.weight$", name) or not tensor.shape:
        return tensor  # no rotary rows: another matrix, or a scalar of the optimizer
    rows = tensor.shape[0]
    if rows % head_dim or head_dim % 2:
        raise CheckpointError(
            f"{name} has {rows} rows, which cannot be split into heads of {head_dim}"
        )

    def reorder(whole: Tensor) -> Tensor:
        heads = whole.view(rows // head_dim, *split, *whole.shape[1:])
        return heads.transpose(1, 2).reshape(whole.shape)

    return Changed(tensor.shape, tensor.dtype, tensor, reorder)
