"""The attention core and its masks: which keys a query sees, and which backend (SDPA, cuDNN, flash,
flex) computes which mask. No parameters, no state.

Each layer calls its own `Attention` instance as a module, so that parallel code can hook or replace
it. Which keys a query sees is described by a `Mask`, built once per forward pass and window size
and shared by layers. A key is visible to a query if it does not come after it, if it is within the
window, and if both belong to the same document:

    k_position <= q_position,   q_position - k_position < window,   q_document == k_document

Positions here are places in the row, not rotary positions (which may restart with each document).
Keys are those of the whole row; queries too, or those of some pieces of it, which is what a rank
has under context parallelism. The tokens of a document are adjacent and have the same number.

A mask has one of these forms: `causal` (nothing to store), `dense` (a bool per pair), `varlen` (run
lengths, flash), `block` (flex attention's sparse blocks). Which backend computes which mask is
decided when the mask is built, never per layer:

| backend | device | plain causal | sliding window, documents, pieces of the row |
|---|---|---|---|
| `auto`  | any        | SDPA, any kernel     | GPU: varlen flash or flex; CPU: dense |
| `sdpa`  | any        | SDPA, any kernel     | SDPA with a dense bool mask           |
| `cudnn` | CUDA       | SDPA pinned to cuDNN | refused                               |
| `flash` | CUDA, ROCm | SDPA pinned to flash | varlen flash (half precision)         |
| `flex`  | CUDA, ROCm | flex attention       | flex attention, sparse blocks         |

A backend that cannot compute a mask raises a ModelError; a mask is never weakened. All of them work
under `torch.compile(fullgraph=True)` per layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from overland.errors import ModelError
from overland.words import did_you_mean

BACKENDS = ("auto", "cudnn", "flash", "flex", "sdpa")
HALF = (torch.float16, torch.bfloat16)
FEWEST_RUNS = 128  # passed to varlen attention

# Kernels that SDPA may use for a plain causal mask, best first; if empty, SDPA chooses.
CAUSAL_KERNELS: dict[str, tuple[str, ...]] = {
    "auto": (),
    "sdpa": (),
    "cudnn": ("CUDNN_ATTENTION",),
    "flash": ("FLASH_ATTENTION",),
}


class Attention(nn.Module):
    """Computes softmax(q k^T / sqrt(d)) v over the visible keys; K key-value heads serve H query
    heads."""

    def forward(self, q_BHSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, mask: Mask) -> Tensor:
        return _FORMS[mask.form](q_BHSd, k_BKSd, v_BKSd, mask)


def _causal(q_BHSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, mask: Mask) -> Tensor:
    grouped = q_BHSd.shape[1] != k_BKSd.shape[1]
    kernels = [getattr(SDPBackend, name) for name in mask.kernels]
    with sdpa_kernel(kernels) if kernels else nullcontext():
        return F.scaled_dot_product_attention(
            q_BHSd, k_BKSd, v_BKSd, is_causal=True, enable_gqa=grouped
        )


def _dense(q_BHSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, mask: Mask) -> Tensor:
    # On GPUs only the memory-efficient kernel accepts a mask, and it does not support grouped
    # heads: with enable_gqa, SDPA would fall back to materializing all scores.
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

    batch = q_BHSd.shape[0]
    # Flash counts the keys to the left of the query, so a window of 1 is 0 to the left.
    left = -1 if mask.window is None else mask.window - 1
    grouped: dict[str, Any] = {"enable_gqa": True} if mask.tell_gqa else {}
    outs, first = [], 0
    for piece in mask.pieces:
        num_queries, num_keys = piece.stop - piece.start, piece.stop
        out_THd = varlen_attn(
            q_BHSd[:, :, first : first + num_queries].transpose(1, 2).flatten(0, 1),
            k_BKSd[:, :, :num_keys].transpose(1, 2).flatten(0, 1),
            v_BKSd[:, :, :num_keys].transpose(1, 2).flatten(0, 1),
            piece.q_starts_R,
            piece.k_starts_R,
            num_queries,  # upper bounds: computing the longest run would wait for the device
            num_keys,
            window_size=(left, 0),  # the last query of a run sees its last key
            **grouped,
        )
        assert isinstance(out_THd, Tensor)
        outs.append(out_THd.unflatten(0, (batch, num_queries)).transpose(1, 2))
        first += num_queries
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _block(q_BHSd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, mask: Mask) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled flex attention materializes all scores; inside a compiled layer it is traced.
    attend: Callable[..., Tensor] = flex_attention
    if not torch.compiler.is_compiling():
        attend = _compiled(flex_attention)
    grouped = q_BHSd.shape[1] != k_BKSd.shape[1]
    return attend(q_BHSd, k_BKSd, v_BKSd, block_mask=mask.block_mask, enable_gqa=grouped)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


_FORMS: dict[str, Callable[[Tensor, Tensor, Tensor, Mask], Tensor]] = {
    "causal": _causal,
    "dense": _dense,
    "varlen": _varlen,
    "block": _block,
}


@dataclass(frozen=True)
class Piece:
    """Adjacent queries of a row, from `start` to `stop`, and the keys up to `stop` of each run.
    Offsets are int32, into the flattened batch of these queries and of these keys."""

    start: int
    stop: int
    q_starts_R: Tensor
    k_starts_R: Tensor

    @classmethod
    def of(cls, start: int, stop: int, seq_len: int, run_starts_R: Tensor) -> Piece:
        """Cuts the runs of whole rows. Those without a query here are empty."""
        row_R, place_R = run_starts_R // seq_len, run_starts_R % seq_len
        q_starts_R = row_R * (stop - start) + (place_R - start).clamp(0, stop - start)
        return cls(start, stop, q_starts_R, row_R * stop + place_R.clamp(max=stop))


@dataclass(frozen=True)
class Mask:
    form: str  # causal | dense | varlen | block
    kernels: tuple[str, ...] = ()  # SDPA kernels, best first, that may compute `causal`
    window: int | None = None
    visible_BQK: Tensor | None = None  # dense: True where visible; B is 1 if rows are alike
    pieces: tuple[Piece, ...] = ()  # varlen: one after the other, all queries
    tell_gqa: bool = False  # varlen: torch after 2.11 must be told about grouped heads
    block_mask: Any = None  # block


class Masks(nn.Module):
    """Builds the masks of a forward pass. Parallel code that redistributes queries and keys
    replaces this module (`decoder.model.masks`) and calls `build_mask` with its positions."""

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
    documents_BS: Tensor | None = None,
    pieces: Sequence[tuple[int, int]] | None = None,
) -> Mask:
    """Builds a mask in the form that the backend computes; raises a ModelError if it cannot.

    Args:
        attention: The backend.
        batch: Number of rows.
        seq_len: Length of the rows, all of whose keys are given.
        device: Where queries and keys are.
        dtype: Their type.
        window: How many keys a query sees at most.
        documents_BS: The document of each token of the rows.
        pieces: Start and stop of each part of the rows whose queries are given; None: all of them.
    """
    if window is not None and window >= seq_len:
        window = None
    form = choose_form(
        attention,
        device,
        dtype,
        window=window,
        documents=documents_BS is not None,
        moved=pieces is not None,
    )
    if form == "causal":
        return Mask(form, kernels=CAUSAL_KERNELS[attention])
    pieces = pieces or [(0, seq_len)]
    if form == "varlen":
        if documents_BS is None:
            run_starts_R = torch.arange(batch + 1, device=device, dtype=torch.int32) * seq_len
        else:
            run_starts_R = run_starts(documents_BS)
        cut = tuple(Piece.of(start, stop, seq_len, run_starts_R) for start, stop in pieces)
        # Checked here and not at the call: torch.compile cannot trace signatures.
        return Mask(form, window=window, pieces=cut, tell_gqa=must_tell_gqa())

    keys_1K = torch.arange(seq_len, device=device)[None]
    queries_1Q = torch.cat([keys_1K[:, start:stop] for start, stop in pieces], dim=1)
    q_documents_BQ = None
    if documents_BS is not None:
        q_documents_BQ = torch.cat([documents_BS[:, start:stop] for start, stop in pieces], dim=1)
    sides = (queries_1Q, keys_1K, q_documents_BQ, documents_BS)
    if form == "block":
        return Mask(form, window=window, block_mask=_block_mask(*sides, window, batch))
    return Mask(form, window=window, visible_BQK=visible_keys(*sides, window))


def visible_keys(
    q_positions_BQ: Tensor,
    k_positions_BK: Tensor,
    q_documents_BQ: Tensor | None,
    k_documents_BK: Tensor | None,
    window: int | None,
) -> Tensor:
    """Returns the mask for each pair: True where the query sees the key."""
    distance_BQK = q_positions_BQ[:, :, None] - k_positions_BK[:, None, :]
    seen_BQK = distance_BQK >= 0
    if window is not None:
        seen_BQK = seen_BQK & (distance_BQK < window)
    if q_documents_BQ is not None and k_documents_BK is not None:
        seen_BQK = seen_BQK & (q_documents_BQ[:, :, None] == k_documents_BK[:, None, :])
    return seen_BQK


def run_starts(documents_BS: Tensor) -> Tensor:
    """Returns where each run of equal documents starts in the flattened batch, then the total.

    The result is padded with empty runs, which cost almost nothing, to a power of two that is
    rarely exceeded: compiled layers see few shapes, not one per batch. Finding the starts waits for
    the device once per forward pass.
    """
    starts_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    starts_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    starts_R = starts_BS.flatten().nonzero().squeeze(1)
    length = max(FEWEST_RUNS, 1 << starts_R.numel().bit_length())
    padding = documents_BS.numel() * torch.ones(
        length + 1 - starts_R.numel(), dtype=torch.int64, device=documents_BS.device
    )
    return torch.cat((starts_R, padding)).to(torch.int32)


def compute_dtype(x_BSD: Tensor) -> torch.dtype:
    """Returns the dtype that queries will have: autocast computes projections of float32 inputs in
    lower precision."""
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
    from torch.nn.attention.flex_attention import create_block_mask

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

    # Compiled, because eager evaluation materializes every pair, 16 GB of them at 128k tokens.
    return _compiled(create_block_mask)(
        seen, batch, None, num_queries, num_keys, device=str(q_positions_BQ.device)
    )


@cache
def must_tell_gqa() -> bool:
    """Whether this version of torch must be told about grouped heads. The import is slow because it
    loads the compiler, which a CPU does not need."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def check_backend(attention: str) -> str:
    if attention not in BACKENDS:
        raise ModelError(
            f"attention backend '{attention}' does not exist{did_you_mean(attention, BACKENDS)}"
        )
    return attention


def choose_form(
    attention: str,
    device: torch.device,
    dtype: torch.dtype,
    window: int | None,
    documents: bool,
    moved: bool,
    deterministic: bool | None = None,
) -> str:
    """Returns the form of mask for this backend and these requirements."""
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    on_gpu = device.type == "cuda"  # also for ROCm
    if attention in ("cudnn", "flash", "flex") and not on_gpu:
        raise ModelError(
            f"attention backend '{attention}' needs a GPU, but the model runs on {device.type}; "
            "use 'auto' or 'sdpa'"
        )
    if attention in ("cudnn", "flash") and dtype not in HALF:
        raise ModelError(
            f"attention backend '{attention}' computes in float16 or bfloat16, but the model runs "
            f"in {_name(dtype)}; use 'auto', 'flex' or 'sdpa'"
        )
    if attention == "cudnn" and torch.version.hip:
        raise ModelError("attention backend 'cudnn' does not exist on ROCm; use 'flash' or 'auto'")
    if attention == "cudnn" and deterministic:
        raise ModelError("attention backend 'cudnn' is not deterministic; use 'flash' or 'auto'")
    if attention == "flex":
        return "block"

    if window is None and not documents and not moved:
        return "causal"
    if attention == "cudnn":
        asked = "documents" if documents else "a sliding window" if window else "pieces of a row"
        raise ModelError(
            f"attention backend 'cudnn' cannot mask {asked}; use 'auto', 'flash', 'flex' or 'sdpa'"
        )
    if attention == "flash":
        return "varlen"
    if attention == "sdpa" or not on_gpu or dtype == torch.float64:
        return "dense"
    # varlen flash has not been tested on ROCm; flex uses Triton there.
    return "block" if dtype not in HALF or torch.version.hip else "varlen"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
