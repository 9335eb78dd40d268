"""Who sees whom: the mask of one forward pass, made once per distinct window and shared by layers.

A key is visible to a query if it does not come after it, if it is nearer than the window, and if
both belong to the same document:

    k_position <= q_position,   q_position - k_position < window,   q_document == k_document

Positions here are places in the row, not rotary positions (those may restart with each document).
Queries and keys carry their own, so that context parallel can give permuted queries of one rank
against the gathered keys of all. Documents are runs: the same number side by side.

The form is how the attention core is told: `causal` (nothing to store), `dense` (a bool per pair),
`varlen` (run lengths, flash), `block` (flex attention's sparse blocks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from overland.models.backend import CAUSAL_KERNELS, choose_form, varlen_parameters


@dataclass(frozen=True)
class Mask:
    form: str  # causal | dense | varlen | block
    kernels: tuple[str, ...] = ()  # SDPA kernels, best first, that may compute `causal`
    window: int | None = None
    visible_BQK: Tensor | None = None  # dense: True where visible; leading 1 if rows are alike
    run_starts_R: Tensor | None = None  # varlen: int32 offsets into the flattened batch
    tell_gqa: bool = False  # varlen: torch 2.11 takes grouped heads as they come, later ones ask
    block_mask: Any = None  # block


class Masks(nn.Module):
    """Makes the masks of a forward pass. Parallel code that changes who holds which queries and
    keys replaces this module (`decoder.model.masks`) and calls `build_mask` with its positions."""

    def __init__(self, attention: str, windows: list[int | None]) -> None:
        super().__init__()
        self.attention = attention
        self.windows = windows

    def forward(
        self, x_BSD: Tensor, seq_len: int, documents_BS: Tensor | None
    ) -> dict[int | None, Mask]:
        batch, dtype = x_BSD.shape[0], compute_dtype(x_BSD)
        return {
            window: build_mask(
                self.attention, batch, seq_len, x_BSD.device, dtype, window, documents_BS
            )
            for window in self.windows
        }


def build_mask(
    attention: str,
    batch: int,
    seq_len: int,
    device: torch.device,
    dtype: torch.dtype,
    window: int | None = None,
    q_documents_BQ: Tensor | None = None,
    k_documents_BK: Tensor | None = None,
    q_positions_BQ: Tensor | None = None,
    k_positions_BK: Tensor | None = None,
) -> Mask:
    """A mask in the form that the backend computes, or a ModelError where it cannot.

    Without positions, queries and keys are the same `seq_len` places in order. With them, both
    must be given ([B, Q] and [B, K], or [1, Q] and [1, K] if all rows are alike).
    """
    if window is not None and q_positions_BQ is None and window >= seq_len:
        window = None
    if k_documents_BK is None and k_positions_BK is None:
        k_documents_BK = q_documents_BQ
    form = choose_form(
        attention,
        device,
        dtype,
        window=window,
        documents=q_documents_BQ is not None,
        moved=q_positions_BQ is not None,
    )
    if form == "causal":
        return Mask(form, kernels=CAUSAL_KERNELS[attention])
    if form == "varlen":
        if q_documents_BQ is None:
            run_starts_R = torch.arange(batch + 1, device=device, dtype=torch.int32) * seq_len
        else:
            run_starts_R = run_starts(q_documents_BQ)
        # Asked here and not where it is called: signatures cannot be traced by torch.compile.
        tell_gqa = "enable_gqa" in varlen_parameters()
        return Mask(form, window=window, run_starts_R=run_starts_R, tell_gqa=tell_gqa)

    if q_positions_BQ is None or k_positions_BK is None:
        assert q_positions_BQ is k_positions_BK, "give both positions or none"
        q_positions_BQ = k_positions_BK = torch.arange(seq_len, device=device)[None]
    sides = (q_positions_BQ, k_positions_BK, q_documents_BQ, k_documents_BK)
    if form == "block":
        return Mask(form, window=window, block_mask=_block_mask(*sides, window, batch))
    return Mask(form, window=window, visible_BQK=visible(*sides, window))


def visible(
    q_positions_BQ: Tensor,
    k_positions_BK: Tensor,
    q_documents_BQ: Tensor | None,
    k_documents_BK: Tensor | None,
    window: int | None,
) -> Tensor:
    """The definition, pair by pair: True where the query sees the key."""
    distance_BQK = q_positions_BQ[:, :, None] - k_positions_BK[:, None, :]
    seen_BQK = distance_BQK >= 0
    if window is not None:
        seen_BQK = seen_BQK & (distance_BQK < window)
    if q_documents_BQ is not None and k_documents_BK is not None:
        seen_BQK = seen_BQK & (q_documents_BQ[:, :, None] == k_documents_BK[:, None, :])
    return seen_BQK


def run_starts(documents_BS: Tensor) -> Tensor:
    """Where each run of equal documents starts in the flattened batch, then the total.

    Padded with empty runs to a power of two: compiled layers see few shapes, not one per batch.
    Finding the starts waits for the device once per forward.
    """
    starts_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    starts_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    starts_R = starts_BS.flatten().nonzero().squeeze(1)
    length = 1 << (starts_R.numel()).bit_length()
    padding = documents_BS.numel() * torch.ones(
        length + 1 - starts_R.numel(), dtype=torch.int64, device=documents_BS.device
    )
    return torch.cat((starts_R, padding)).to(torch.int32)


def compute_dtype(x_BSD: Tensor) -> torch.dtype:
    """What queries will have: autocast turns the projections of float32 inputs narrower."""
    kind = x_BSD.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x_BSD.dtype


def _block_mask(
    q_positions_BQ: Tensor,
    k_positions_BK: Tensor,
    q_documents_BQ: Tensor | None,
    k_documents_BK: Tensor | None,
    window: int | None,
    batch: int,
) -> Any:
    num_queries, num_keys = q_positions_BQ.shape[1], k_positions_BK.shape[1]
    q_positions_BQ = q_positions_BQ.expand(batch, num_queries)
    k_positions_BK = k_positions_BK.expand(batch, num_keys)

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        distance = q_positions_BQ[b, q] - k_positions_BK[b, k]
        result = distance >= 0
        if window is not None:
            result = result & (distance < window)
        if q_documents_BQ is not None and k_documents_BK is not None:
            result = result & (q_documents_BQ[b, q] == k_documents_BK[b, k])
        return result

    return _block_mask_maker()(
        seen, batch, None, num_queries, num_keys, device=str(q_positions_BQ.device)
    )


@cache
def _block_mask_maker() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    # Compiled: eager evaluation holds every pair, 16 GB of them at 128k tokens.
    return torch.compile(create_block_mask)
