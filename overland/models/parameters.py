"""The parameters of a decoder by Hugging Face name and shape, without building it (no torch)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overland.models.config import DecoderConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shape by name, in the order of the forward pass. A tied lm_head is the embedding, once."""
    vocab, width = config.vocab_size, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocab, width)}
    for layer in range(config.num_hidden_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (width,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (vocab, width)
    return shapes


def _layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    width, mlp_width, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_width = config.num_attention_heads * head_dim
    kv_width = config.num_key_value_heads * head_dim
    linears = {
        "self_attn.q_proj": (q_width, width, config.qkv_bias),
        "self_attn.k_proj": (kv_width, width, config.qkv_bias),
        "self_attn.v_proj": (kv_width, width, config.qkv_bias),
        "self_attn.o_proj": (width, q_width, config.o_proj_bias),
        "mlp.gate_proj": (mlp_width, width, config.mlp_bias),
        "mlp.up_proj": (mlp_width, width, config.mlp_bias),
        "mlp.down_proj": (width, mlp_width, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (width,)}
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (head_dim,)
        shapes["self_attn.k_norm.weight"] = (head_dim,)
    shapes["post_attention_layernorm.weight"] = (width,)
    return shapes
