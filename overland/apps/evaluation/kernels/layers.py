"""The operations of a layer in generation, without gradients, in as few kernels as possible: plain
definitions, and when Triton versions run instead. In generation a step has few rows: reading each
weight once should take all of the time.

These are the plain definitions; the Triton versions (triton_inference.py and, for attention of one
new token per row to those before it, triton_cached_attention.py) need bfloat16 or float16.

The cache of keys and values has T places per row. A row's `length` is the number of places in use;
the new token gets the next one, and its rotary position is the same number.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from overland.apps.evaluation.kernels import Heads
from overland.kernels import runs_triton
from overland.models.decoder import rms_norm
from overland.models.rope import rotate

MOST_ROWS = 64  # with more rows the product itself takes time, and a library is faster


def linear(x_BD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    if not _is_few(x_BD, weight_ND):
        return F.linear(x_BD, weight_ND, bias_N)
    from overland.apps.evaluation.kernels import triton_inference

    return triton_inference.linear(x_BD, weight_ND, bias_N)


def gated(x_BD: Tensor, weight_2FD: Tensor, bias_2F: Tensor | None = None) -> Tensor:
    """Returns silu(gate) * up; the matrix holds the rows of the gate, then those of the other."""
    if bias_2F is None and _is_few(x_BD, weight_2FD):
        from overland.apps.evaluation.kernels import triton_inference

        return triton_inference.gated(x_BD, weight_2FD)
    both_B2F = F.linear(x_BD, weight_2FD, bias_2F)
    if _takes(x_BD):
        from overland.apps.evaluation.kernels import triton_inference

        return triton_inference.silu_times(both_B2F)
    gate_BF, up_BF = both_B2F.chunk(2, dim=1)
    return F.silu(gate_BF) * up_BF


def add_norm(
    x_BD: Tensor, more_BD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns x + more, and its RMSNorm."""
    if _takes(x_BD):
        from overland.apps.evaluation.kernels import triton_inference

        return triton_inference.add_norm(x_BD, more_BD, weight_D, eps)
    if more_BD is not None:
        x_BD = x_BD + more_BD
    return x_BD, rms_norm(x_BD, weight_D, eps)


def _is_few(x_BD: Tensor, weight_ND: Tensor) -> bool:
    return len(x_BD) <= MOST_ROWS and _takes(weight_ND)


def _takes(tensor: Tensor) -> bool:
    """Whether a Triton version takes this tensor and others like it."""
    return tensor.dtype in (torch.bfloat16, torch.float16) and runs_triton(tensor)


def begin(qkv_BSE: Tensor, keys_BKTd: Tensor, values_BKTd: Tensor, heads: Heads) -> Tensor:
    """Processes rows from their first token on: writes their keys and values, and returns the
    queries, [B, S, H, d]."""
    if _takes(qkv_BSE):
        from overland.apps.evaluation.kernels import triton_cached_attention

        return triton_cached_attention.begin(qkv_BSE, keys_BKTd, values_BKTd, heads)
    seq_len = qkv_BSE.shape[1]
    q_BSHd, k_BSKd, v_BSKd = _turned(
        qkv_BSE, keys_BKTd, heads.cos_Td[None, :seq_len], heads.sin_Td[None, :seq_len], heads
    )
    keys_BKTd[:, :, :seq_len] = k_BSKd.transpose(1, 2)
    values_BKTd[:, :, :seq_len] = v_BSKd.transpose(1, 2)
    return q_BSHd


def attend(
    qkv_BE: Tensor, keys_BKTd: Tensor, values_BKTd: Tensor, lengths_B: Tensor, heads: Heads
) -> Tensor:
    """Returns [B, H d]; writes the new keys and values. `qkv_BE` holds the heads of the queries,
    then those of the keys, then those of the values."""
    if _takes(qkv_BE):
        from overland.apps.evaluation.kernels import triton_cached_attention

        return triton_cached_attention.attend(qkv_BE, keys_BKTd, values_BKTd, lengths_B, heads)
    cos_Bd, sin_Bd = heads.cos_Td[lengths_B], heads.sin_Td[lengths_B]
    q_BHd, k_BKd, v_BKd = _turned(qkv_BE, keys_BKTd, cos_Bd, sin_Bd, heads)
    rows_B = torch.arange(len(qkv_BE), device=qkv_BE.device)
    keys_BKTd[rows_B, :, lengths_B] = k_BKd
    values_BKTd[rows_B, :, lengths_B] = v_BKd
    out_BHd = cached_attention(q_BHd, keys_BKTd, values_BKTd, lengths_B + 1, heads.window)
    return out_BHd.flatten(1)


def cached_attention(
    q_BHd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, lengths_B: Tensor, window: int | None
) -> Tensor:
    """Returns softmax(q k^T / sqrt(d)) v over the keys that each row sees: its first `length`, or
    the last `window` of these."""
    num_kv_heads = k_BKTd.shape[1]
    places_T = torch.arange(k_BKTd.shape[2], device=k_BKTd.device)
    seen_BT = places_T < lengths_B[:, None]
    if window is not None:
        seen_BT &= places_T >= lengths_B[:, None] - window
    # The G queries that share a key-value head are treated as rows, so nothing is repeated.
    q_BKGd = q_BHd.unflatten(1, (num_kv_heads, -1))
    mask_BKGT = seen_BT[:, None, None, :]
    out_BKGd = F.scaled_dot_product_attention(q_BKGd, k_BKTd, v_BKTd, attn_mask=mask_BKGT)
    return out_BKGd.flatten(1, 2)


def _turned(
    qkv: Tensor, keys_BKTd: Tensor, cos: Tensor, sin: Tensor, heads: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits [..., E] into [..., heads, d]; normalizes and rotates queries and keys."""
    num_kv_heads, head_dim = keys_BKTd.shape[1], keys_BKTd.shape[3]
    each = qkv.unflatten(-1, (-1, head_dim))
    num_heads = each.shape[-2] - 2 * num_kv_heads
    q, k, v = each.split((num_heads, num_kv_heads, num_kv_heads), dim=-2)
    if heads.q_norm_d is not None and heads.k_norm_d is not None:
        q, k = rms_norm(q, heads.q_norm_d, heads.eps), rms_norm(k, heads.k_norm_d, heads.eps)
    turns = cos[..., None, :], sin[..., None, :]
    return rotate(q, *turns), rotate(k, *turns), v
