"""Memory that a pass takes beside parameters and gradients, from shapes alone (no torch).

A config that has a method `activations(Pass)` lets a run choose how much to recompute by what fits
the device; of any other model nothing is known, and nothing is recomputed unless asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overland.models.config import DecoderConfig

# Tokens whose logits exist at a time (see loss.py): where they are widened in memory, and where a
# kernel does all in place.
CHUNK_TOKENS = 2048
KERNEL_CHUNK_TOKENS = 8192


@dataclass(frozen=True)
class Pass:
    """One micro-batch on one device, and how it is computed."""

    tokens: int
    size: int  # bytes of a number
    tp: int = 1
    cp: int = 1
    recompute: str = "none"  # or selective (by operator), or full
    compiled: bool = False
    float8: bool = False
    kernels: bool = True  # our own take part, as on NVIDIA GPUs


@dataclass(frozen=True)
class Activations:
    """Bytes on one device."""

    kept: float  # by one block, from its forward to its backward pass
    block: float  # made by the backward pass of one block
    head: float  # made by what stands after the blocks


def decoder_activations(model: DecoderConfig, one: Pass) -> Activations:
    size, tp, tokens = one.size, one.tp, one.tokens
    matrix = model.vocab_size * model.hidden_size / tp
    hidden = tokens * model.hidden_size * size / tp
    kept = _kept_per_token(model, one)
    whole = _kept_per_token(model, replace(one, recompute="none"))
    chunk = min(tokens, CHUNK_TOKENS) * (size + 8)
    if one.kernels:
        chunk = min(tokens, KERNEL_CHUNK_TOKENS) * size
    return Activations(
        kept=tokens * kept,
        # Gradients of gate, up and their product; what is computed again; the output matrix's
        # gradient, narrow by now.
        block=tokens * (3 * size * model.intermediate_size / tp + whole - kept)
        + size * matrix
        + 2 * hidden,
        # The gradient of the output matrix is added up in float32; and the last norm's input and
        # output, and the gradient of the latter.
        head=chunk * model.vocab_size / tp + 4 * matrix + 3 * hidden,
    )


def _kept_per_token(model: DecoderConfig, one: Pass) -> float:
    """Bytes per token and block that are kept for its backward pass."""
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
    else:  # in 8 bits, attention's output once more; uncompiled, each product casts for itself
        inputs = (2 if one.compiled else 5) * width + inner + q
    if model.qk_norm:
        outputs += size * (q + kv)
    if not one.compiled:  # norms keep a float32 and a rounded input, silu(gate) is kept too
        residuals = 2 * (4 + size) * width / tp
        outputs += size * inner
    return outputs + residuals + inputs
