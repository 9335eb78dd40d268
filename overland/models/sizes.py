"""The structure of a decoder and the memory of a pass, from its sizes alone, without torch.

A config with a method `activations(PassShape)` lets a run choose how much to recompute so that it
fits the device; for any other model there is no estimate, and nothing is recomputed unless
configured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from overland.models.structure import Role, Structure

# Tokens whose logits exist at a time (see loss.py): if they are converted to float32 in memory, and
# if a kernel does everything in place.
CHUNK_TOKENS = 2048
KERNEL_CHUNK_TOKENS = 8192
NF4_BYTES = 1 / 2 + 2 / 64  # of a weight in 4 bits, with its share of a scale (kernels/nf4.py)

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


class DecoderSizes(Protocol):
    """What the memory and the structure of a decoder depend on: a `DecoderConfig`, for example."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def sliding_window(self) -> int | None: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def o_proj_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...


def decoder_structure(config: DecoderSizes, plain: bool) -> Structure:
    """Returns the structure of a decoder. `plain`: the blocks are not customized."""
    return Structure(
        blocks=("model.layers",),
        first_stage=("model.embed_tokens",),
        last_stage=("model.norm", "lm_head"),
        ties={HEAD: EMBEDDING} if config.tie_word_embeddings else {},
        between=lambda tokens: (tokens, config.hidden_size),
        roles=ROLES,
        compiled=("model.norm",),
        random=not plain,
        # Masks of windows are built in every pass, and have not been tested with CUDA graphs.
        recordable=plain and config.sliding_window is None,
    )


def parameter_shapes(config: DecoderSizes) -> dict[str, tuple[int, ...]]:
    """Returns the shapes by name, in the order of the forward pass. A tied lm_head is not listed
    again."""
    vocab, width = config.vocab_size, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocab, width)}
    for layer in range(config.num_hidden_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (width,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (vocab, width)
    return shapes


def _layer_shapes(config: DecoderSizes) -> dict[str, tuple[int, ...]]:
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


@dataclass(frozen=True)
class PassShape:
    """One micro-batch on one device, and how it is computed."""

    tokens: int
    size: int  # bytes of a number
    tp: int = 1
    cp: int = 1
    recompute: str = "none"  # or selective (by operator), or full
    compiled: bool = False
    float8: bool = False
    kernels: bool = True  # our own kernels are used, as on NVIDIA GPUs
    trains_head: bool = True


@dataclass(frozen=True)
class Activations:
    """Memory of activations: bytes on one device."""

    kept: float  # by one block, from its forward to its backward pass
    block: float  # temporaries of the backward pass of one block
    head: float  # temporaries of the modules after the blocks, and the output matrix's gradient


def decoder_activations(model: DecoderSizes, one: PassShape) -> Activations:
    size, tp, tokens = one.size, one.tp, one.tokens
    matrix = model.vocab_size * model.hidden_size / tp
    hidden = tokens * model.hidden_size * size / tp
    kept = _kept_per_token(model, one)
    whole = _kept_per_token(model, replace(one, recompute="none"))
    trained = matrix if one.trains_head else 0.0
    vocab = model.vocab_size / tp
    chunk = min(tokens, CHUNK_TOKENS) * vocab
    # Logits, and the gradient of the output matrix, accumulated in float32.
    loss = chunk * (size + 8) + 4 * trained
    if tp > 1:  # The rows are gathered, and their gradient is wide until it is summed.
        before = 4 * trained if tokens > CHUNK_TOKENS else 0.0
        loss = max(chunk * (size + 4) + before, chunk * size + 4 * trained)
        loss += tokens * model.hidden_size * (size + 4)
    elif one.kernels:
        loss = min(tokens, KERNEL_CHUNK_TOKENS) * vocab * size + 4 * trained
    return Activations(
        kept=tokens * kept,
        # Gradients of gate, up and their product; what is recomputed.
        block=tokens * (3 * size * model.intermediate_size / tp + whole - kept) + 2 * hidden,
        # The last norm's input and output, and the gradient of the latter.
        head=loss + 3 * hidden,
    )


def _kept_per_token(model: DecoderSizes, one: PassShape) -> float:
    """Returns the bytes per token and block that are kept for its backward pass."""
    size, tp = one.size, one.tp
    width, inner = model.hidden_size, model.intermediate_size / tp
    q = model.num_attention_heads * model.head_dim / tp
    kv = model.num_key_value_heads * model.head_dim / tp
    if one.recompute == "full":
        return size * width / tp
    # Queries, keys, values, the output, and a number per head; gate and up.
    outputs = size * (2 * q + 2 * kv * one.cp + 2 * inner)
    outputs += 4 * model.num_attention_heads / tp
    residuals = size * 2 * width / tp
    if one.recompute == "selective":
        return outputs + residuals + (0 if one.compiled else size * width / tp)

    if not one.float8:  # both norms' outputs, and silu(gate) · up
        inputs = size * (2 * width + inner)
    else:  # in 8 bits, attention's output as well; uncompiled, each product casts separately
        inputs = (2 if one.compiled else 5) * width + inner + q
    if model.qk_norm:
        outputs += size * (q + kv)
    if not one.compiled:  # norms keep a float32 and a rounded input; silu(gate) is also kept
        residuals = 2 * (4 + size) * width / tp
        outputs += size * inner
    return outputs + residuals + inputs
