"""Attention of one new token per row over the keys and values that are kept of its row.

A row has its own length: keys from there on are of no token yet, or of another row's padding, and
are not seen. The new token's own key is among those that are kept, the last one of `lengths_B`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
    # The G queries that share a key-value head are its rows, so nothing is repeated.
    q_BKGd = q_BHd.unflatten(1, (num_kv_heads, -1))
    mask_BKGT = seen_BT[:, None, None, :]
    out_BKGd = F.scaled_dot_product_attention(q_BKGd, k_BKTd, v_BKTd, attn_mask=mask_BKGT)
    return out_BKGd.flatten(1, 2)
