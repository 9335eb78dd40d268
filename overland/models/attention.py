"""The attention core: queries, keys, values and a mask to outputs. No parameters, no state.

Each layer calls its own `Attention` instance as a module, so parallel code can hook it or put
another in its place. What the backends can do is told in backend.py, the masks in mask.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from overland.models.mask import Mask


class Attention(nn.Module):
    """softmax(q k^T / sqrt(d)) v over the visible keys; K key-value heads serve H query heads."""

    def forward(self, q_BHSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, mask: Mask) -> Tensor:
        return _FORMS[mask.form](q_BHSd, k_BKSd, v_BKSd, mask)


def _causal(q_BHSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, mask: Mask) -> Tensor:
    grouped = q_BHSd.shape[1] != k_BKSd.shape[1]
    if not mask.kernels:
        return F.scaled_dot_product_attention(
            q_BHSd, k_BKSd, v_BKSd, is_causal=True, enable_gqa=grouped
        )
    with sdpa_kernel([getattr(SDPBackend, name) for name in mask.kernels]):
        return F.scaled_dot_product_attention(
            q_BHSd, k_BKSd, v_BKSd, is_causal=True, enable_gqa=grouped
        )


def _dense(q_BHSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, mask: Mask) -> Tensor:
    # Only the memory-efficient kernel takes a mask on GPUs, and it knows no grouped heads:
    # with enable_gqa SDPA would fall back to holding all scores.
    assert mask.visible_BQK is not None
    group = q_BHSd.shape[1] // k_BKSd.shape[1]
    k_BHSd, v_BHSd = k_BKSd, v_BKSd
    if group > 1:
        k_BHSd = k_BKSd.repeat_interleave(group, dim=1)
        v_BHSd = v_BKSd.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(
        q_BHSd, k_BHSd, v_BHSd, attn_mask=mask.visible_BQK[:, None]
    )


def _varlen(q_BHSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, mask: Mask) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    assert mask.run_starts_R is not None
    batch, _, seq_len, _ = q_BHSd.shape
    # Flash counts the keys to the left of the query, so a window of 1 is 0 to the left.
    left = -1 if mask.window is None else mask.window - 1
    grouped: dict[str, Any] = {"enable_gqa": True} if mask.tell_gqa else {}
    out_THd = varlen_attn(
        q_BHSd.transpose(1, 2).flatten(0, 1),
        k_BKSd.transpose(1, 2).flatten(0, 1),
        v_BKSd.transpose(1, 2).flatten(0, 1),
        mask.run_starts_R,
        mask.run_starts_R,
        seq_len,  # a bound, not the longest run: finding that one would wait for the device
        seq_len,
        window_size=(left, 0),
        **grouped,
    )
    assert isinstance(out_THd, Tensor)
    return out_THd.unflatten(0, (batch, seq_len)).transpose(1, 2)


def _block(q_BHSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, mask: Mask) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled flex attention holds all scores; inside a compiled layer it is traced as it is.
    attend: Callable[..., Tensor] = flex_attention
    if not torch.compiler.is_compiling():
        attend = _compiled_flex_attention()
    grouped = q_BHSd.shape[1] != k_BKSd.shape[1]
    return attend(q_BHSd, k_BKSd, v_BKSd, block_mask=mask.block_mask, enable_gqa=grouped)


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


_FORMS: dict[str, Callable[[Tensor, Tensor, Tensor, Mask], Tensor]] = {
    "causal": _causal,
    "dense": _dense,
    "varlen": _varlen,
    "block": _block,
}
