"""Attention of one new token per row to those before it, whose keys and values are cached.

The cache has T places per row. A row's `length` is the number of places in use; the new token gets
the next one, and its rotary position is the same number. This is the plain definition; the Triton
version (triton_cached_attention.py) needs bfloat16 or float16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from overland.apps.evaluation.kernels.inference import rms_norm
from overland.kernels import triton_takes


@dataclass(frozen=True)
class Heads:
    """What a layer does to queries and keys before attention."""

    cos_Td: Tensor
    sin_Td: Tensor
    q_norm_d: Tensor | None = None
    k_norm_d: Tensor | None = None
    eps: float = 0.0
    window: int | None = None

    @property
    def turns(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, float]:
        return self.cos_Td, self.sin_Td, self.q_norm_d, self.k_norm_d, self.eps


def begin(qkv_BSE: Tensor, keys_BKTd: Tensor, values_BKTd: Tensor, heads: Heads) -> Tensor:
    """Processes rows from their first token on: writes their keys and values, and returns the
    queries, [B, S, H, d]."""
    if qkv_BSE.dtype not in (torch.bfloat16, torch.float16) or not triton_takes(qkv_BSE):
        return begin_plain(qkv_BSE, keys_BKTd, values_BKTd, heads)
    from overland.apps.evaluation.kernels import triton_cached_attention

    return triton_cached_attention.begin(qkv_BSE, keys_BKTd, values_BKTd, *heads.turns)


def begin_plain(qkv_BSE: Tensor, keys_BKTd: Tensor, values_BKTd: Tensor, heads: Heads) -> Tensor:
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
    if qkv_BE.dtype not in (torch.bfloat16, torch.float16) or not triton_takes(qkv_BE):
        return attend_plain(qkv_BE, keys_BKTd, values_BKTd, lengths_B, heads)
    from overland.apps.evaluation.kernels import triton_cached_attention

    return triton_cached_attention.attend(
        qkv_BE, keys_BKTd, values_BKTd, lengths_B, heads.window, *heads.turns
    )


def attend_plain(
    qkv_BE: Tensor, keys_BKTd: Tensor, values_BKTd: Tensor, lengths_B: Tensor, heads: Heads
) -> Tensor:
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
    return (
        _rotate(q, cos[..., None, :], sin[..., None, :]),
        _rotate(k, cos[..., None, :], sin[..., None, :]),
        v,
    )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
