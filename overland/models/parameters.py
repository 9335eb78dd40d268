"""What a decoder is made of, without building it (no torch): its structure, and its parameters by
Hugging Face name and shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overland.models.structure import Role, Structure

if TYPE_CHECKING:
    from overland.models.config import DecoderConfig

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


def decoder_structure(config: DecoderConfig, plain: bool) -> Structure:
    """`plain`: nobody has changed what the blocks do."""
    return Structure(
        blocks=("model.layers",),
        before=("model.embed_tokens",),
        after=("model.norm", "lm_head"),
        ties={HEAD: EMBEDDING} if config.tie_word_embeddings else {},
        between=lambda tokens: (tokens, config.hidden_size),
        roles=ROLES,
        compiled=("model.norm",),
        random=not plain,
        # Masks of windows are made in every pass, and have not been tried.
        recordable=plain and config.sliding_window is None,
    )


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
