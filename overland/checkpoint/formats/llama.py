"""Llama in Meta's words, which are torchtitan's too: other names, other order of rotary rows.

Meta rotates neighbouring rows of a head (0 with 1, 2 with 3, …); Hugging Face rotates row i with
row i + half. Both compute the same if the rows of wq and wk are ordered accordingly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from overland.checkpoint.formats.lazy import Changed, Lazy
from overland.checkpoint.formats.source import MODEL, OPTIMIZER, split_state
from overland.errors import CheckpointError

_OUTER = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_OUTER_BACK = {hf: meta for meta, hf in _OUTER.items()}
_INNER_BACK = {hf: meta for meta, hf in _INNER.items()}

# Tables of rotary angles, which follow from the config.
COMPUTED = ("rope.freqs", "freqs_cis", "rotary_emb.inv_freq")


def is_meta(names: Iterable[str]) -> bool:
    return "tok_embeddings.weight" in set(names)


def is_computed(name: str) -> bool:
    return name.endswith(COMPUTED)


def hf_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if match is None or match[2] not in _INNER:
        raise CheckpointError(f"{name} is not a parameter of a dense Llama in Meta's names")
    return f"model.layers.{match[1]}.{_INNER[match[2]]}"


def meta_name(name: str) -> str:
    if name in _OUTER_BACK:
        return _OUTER_BACK[name]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if match is None or match[2] not in _INNER_BACK:
        raise CheckpointError(
            f"{name} has no counterpart in Meta's Llama, so this model cannot be written in Meta's "
            "or torchtitan's names"
        )
    return f"layers.{match[1]}.{_INNER_BACK[match[2]]}"


def rows_for_hf(name: str, tensor: Lazy, head_dim: int) -> Lazy:
    """A tensor under its Hugging Face name, from Meta's order of rows."""
    return _reordered(name, tensor, head_dim, (head_dim // 2, 2))


def rows_for_meta(name: str, tensor: Lazy, head_dim: int) -> Lazy:
    return _reordered(name, tensor, head_dim, (2, head_dim // 2))


def in_hf_words(tensors: Mapping[str, Lazy], head_dim: int) -> dict[str, Lazy]:
    """Weights with Hugging Face's names and rows, from Meta's."""
    renamed: dict[str, Lazy] = {}
    for name, tensor in tensors.items():
        if not is_computed(name):
            plain = hf_name(name)
            renamed[plain] = rows_for_hf(plain, tensor, head_dim)
    return renamed


def in_meta_words(tensors: Mapping[str, Lazy], head_dim: int) -> dict[str, Lazy]:
    """A run's entries with Meta's names and rows: `layers.0…`, `optimizer.layers.0….exp_avg`."""
    renamed: dict[str, Lazy] = {}
    for name, tensor in tensors.items():
        state = split_state(name, tensors)
        if state is not None:
            rows = rows_for_meta(state[0], tensor, head_dim)
            renamed[f"{OPTIMIZER}{meta_name(state[0])}.{state[1]}"] = rows
        elif name.startswith(MODEL):
            plain = name.removeprefix(MODEL)
            renamed[MODEL + meta_name(plain)] = rows_for_meta(plain, tensor, head_dim)
        else:
            renamed[name] = tensor
    return renamed


def head_dim_of(config: Mapping[str, Any] | None, why: str) -> int:
    """Rows per head; without it nobody can tell how rows are to be reordered."""
    if config is None:
        raise CheckpointError(
            f"{why} needs the model's config.json to put rotary rows in order; name it with "
            "--config"
        )
    given = config.get("head_dim")
    return int(given or config["hidden_size"] // config["num_attention_heads"])


def check_is_plain_llama(config: Mapping[str, Any], target: str) -> None:
    """Meta's model has no switches for what other families, or newer Llamas, do differently."""
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
        raise CheckpointError(f"{target} holds Llama models only, and of this one {problem}")


def _reordered(name: str, tensor: Lazy, head_dim: int, split: tuple[int, int]) -> Lazy:
    if not re.search(r"self_attn\.[qk]_proj\.weight$", name) or not tensor.shape:
        return tensor  # no rotary rows: another matrix, or a scalar that an optimizer keeps
    rows = tensor.shape[0]
    if rows % head_dim or head_dim % 2:
        raise CheckpointError(f"{name} has {rows} rows, which are no heads of {head_dim} each")

    def reorder(whole: Tensor) -> Tensor:
        heads = whole.view(rows // head_dim, *split, *whole.shape[1:])
        return heads.transpose(1, 2).reshape(whole.shape)

    return Changed(tensor.shape, tensor.dtype, tensor, reorder)
