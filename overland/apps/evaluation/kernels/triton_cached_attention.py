"""The Triton versions of attention in layers.py, whose plain definitions specify what they compute.
Like those in triton_inference.py, they start early."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from overland.apps.evaluation.kernels import Heads
from overland.apps.evaluation.kernels.triton_inference import FEWEST, early, is_last, scratch

PROGRAMS = 64  # to start if there are few rows: they share the keys of a head


def begin(qkv_BSE: Tensor, keys_BKTd: Tensor, values_BKTd: Tensor, heads: Heads) -> Tensor:
    batch, seq_len, width = qkv_BSE.shape
    num_kv_heads, room, head_dim = keys_BKTd.shape[1:]
    num_heads = width // head_dim - 2 * num_kv_heads
    q_BSHd = qkv_BSE.new_empty((batch, seq_len, num_heads, head_dim))
    _begin[(batch * seq_len, num_kv_heads)](
        qkv_BSE, keys_BKTd, values_BKTd, q_BSHd,
        heads.cos_Td, heads.sin_Td, heads.q_norm_d, heads.k_norm_d,
        seq_len, room, heads.eps, keys_BKTd.stride(0),
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        ROWS=triton.next_power_of_2(num_heads // num_kv_heads),
        WIDTH=head_dim,
        PADDED=triton.next_power_of_2(head_dim),
        num_warps=1,
    )  # fmt: skip
    return q_BSHd


def attend(
    qkv_BE: Tensor, keys_BKTd: Tensor, values_BKTd: Tensor, lengths_B: Tensor, heads: Heads
) -> Tensor:
    batch, num_kv_heads, room, head_dim = keys_BKTd.shape
    num_heads = qkv_BE.shape[1] // head_dim - 2 * num_kv_heads
    parts = 1
    while parts < 16 and batch * num_kv_heads * parts < PROGRAMS and parts * 256 < room:
        parts *= 2
    rows = max(FEWEST, triton.next_power_of_2(num_heads // num_kv_heads))
    out_BE = qkv_BE.new_empty((batch, num_heads * head_dim))
    sums, ended = scratch(qkv_BE.device)
    assert parts == 1 or batch * num_kv_heads * parts * rows * (head_dim + 2) <= sums.numel()
    _attend[(batch, num_kv_heads, parts)](
        qkv_BE, keys_BKTd, values_BKTd, lengths_B, out_BE, sums, ended,
        heads.cos_Td, heads.sin_Td, heads.q_norm_d, heads.k_norm_d,
        room,
        head_dim**-0.5,
        heads.eps,
        WINDOW=heads.window or 0,
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        ROWS=rows,
        WIDTH=head_dim,
        PADDED=max(FEWEST, triton.next_power_of_2(head_dim)),
        KEYS=64 if parts == 1 else 128,
        PARTS=parts,
        num_warps=4,
        num_stages=2,
        **early(qkv_BE),
    )  # fmt: skip
    return out_BE


@triton.jit
def _turned(ptr, other, norm_ptr, place, pair, sign, is_inside, cos, sin, eps, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the queries or the key at `ptr`, normalized if requested, and rotated. `pair` is the
    position of the dimension that rotates with each one."""
    narrow = ptr.dtype.element_ty
    x = tl.load(ptr + other + place, mask=is_inside, other=0.0).to(tl.float32)
    y = tl.load(ptr + other + pair, mask=is_inside, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
        x_weight = tl.load(norm_ptr + place, mask=place < WIDTH, other=0.0).to(tl.float32)
        y_weight = tl.load(norm_ptr + pair, mask=place < WIDTH, other=0.0).to(tl.float32)
        x = (x_weight * (x * scale).to(narrow).to(tl.float32)).to(narrow).to(tl.float32)
        y = (y_weight * (y * scale).to(narrow).to(tl.float32)).to(narrow).to(tl.float32)
    return (x * cos + sign * y * sin).to(narrow)


@triton.jit
def _begin(  # type: ignore[no-untyped-def]
    qkv_ptr, keys_ptr, values_ptr, out_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
    seq_len, room, eps, row_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Processes one token, and the queries that share a key head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = token % seq_len
    query, place = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :]
    is_place = place < WIDTH
    is_query = (query < GROUP) & is_place
    pair = (place + WIDTH // 2) % WIDTH
    sign = tl.where(place < WIDTH // 2, -1.0, 1.0)
    cos = tl.load(cos_ptr + position * WIDTH + place, mask=is_place, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * WIDTH + place, mask=is_place, other=0.0).to(tl.float32)
    qkv_ptr += token * (KV_HEADS * (GROUP + 2)) * WIDTH
    mine = (head * GROUP + query) * WIDTH
    q = _turned(qkv_ptr, mine, q_norm_ptr, place, pair, sign, is_query, cos, sin, eps, WIDTH)
    tl.store(out_ptr + token * KV_HEADS * GROUP * WIDTH + mine + place, q, mask=is_query)
    mine = (KV_HEADS * GROUP + head) * WIDTH
    k = _turned(qkv_ptr, mine, k_norm_ptr, place, pair, sign, is_place, cos, sin, eps, WIDTH)
    v = tl.load(qkv_ptr + mine + KV_HEADS * WIDTH + place, mask=is_place, other=0.0)
    cell = (token // seq_len) * row_stride + (head * room + position) * WIDTH + place
    tl.store(keys_ptr + cell, k, mask=is_place)
    tl.store(values_ptr + cell, v, mask=is_place)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    qkv_ptr, keys_ptr, values_ptr, lengths_ptr, out_ptr, sums_ptr, ended_ptr,
    cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, room, scale, eps,
    WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Processes the queries of one row that share a key head, with all or a part of the keys."""
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    narrow = out_ptr.dtype.element_ty
    if EARLY:
        tl.extra.cuda.gdc_wait()
    length = tl.load(lengths_ptr + row).to(tl.int32)
    query, place = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :]
    is_place = place < WIDTH
    pair = (place + WIDTH // 2) % WIDTH
    sign = tl.where(place < WIDTH // 2, -1.0, 1.0)
    cos = tl.load(cos_ptr + length * WIDTH + place, mask=is_place, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + length * WIDTH + place, mask=is_place, other=0.0).to(tl.float32)
    qkv_ptr += row * (KV_HEADS * (GROUP + 2)) * WIDTH
    is_query = (query < GROUP) & is_place
    own = (head * GROUP + query) * WIDTH
    q = _turned(qkv_ptr, own, q_norm_ptr, place, pair, sign, is_query, cos, sin, eps, WIDTH)
    base = (row * KV_HEADS + head) * room * WIDTH

    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, PADDED), tl.float32)
    if part == PARTS - 1:  # the token itself
        new = (KV_HEADS * GROUP + head) * WIDTH
        k = _turned(qkv_ptr, new, k_norm_ptr, place, pair, sign, is_place, cos, sin, eps, WIDTH)
        v = tl.load(qkv_ptr + new + KV_HEADS * WIDTH + place, mask=is_place, other=0.0)
        tl.store(keys_ptr + base + length * WIDTH + place, k, mask=is_place)
        tl.store(values_ptr + base + length * WIDTH + place, v, mask=is_place)
        peak = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
        total += 1.0
        sums += v.to(tl.float32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length + 1 - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(length - first, PARTS), KEYS) * KEYS
    start = first + part * share
    end = tl.minimum(start + share, length)
    for at in tl.range(start, end, KEYS):
        key = at + tl.arange(0, KEYS)[:, None]
        cell = base + key * WIDTH + place
        is_key = (key < end) & is_place
        keys = tl.load(keys_ptr + cell, mask=is_key, other=0.0)
        values = tl.load(values_ptr + cell, mask=is_key, other=0.0)
        scores = tl.dot(q, keys.T) * scale
        scores = tl.where(at + tl.arange(0, KEYS)[None, :] < end, scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        chances = tl.exp(scores - higher[:, None])
        shrink = tl.exp(peak - higher)
        total = total * shrink + tl.sum(chances, 1)
        sums = sums * shrink[:, None] + tl.dot(chances.to(narrow), values)
        peak = higher
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()

    is_mine = True
    if PARTS > 1:
        # A part's sums, then its peaks and totals.
        queries = tl.arange(0, ROWS)
        cell = (row * KV_HEADS + head) * PARTS * ROWS * (WIDTH + 2)
        mine = cell + part * ROWS * (WIDTH + 2)
        tl.store(sums_ptr + mine + query * WIDTH + place, sums, mask=is_place)
        tl.store(sums_ptr + mine + ROWS * WIDTH + queries, peak)
        tl.store(sums_ptr + mine + ROWS * (WIDTH + 1) + queries, total)
        is_mine = is_last(ended_ptr + row * KV_HEADS + head, PARTS)
    if is_mine:
        if PARTS > 1:
            peak = tl.full((ROWS,), -float("inf"), tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            sums = tl.zeros((ROWS, PADDED), tl.float32)
            for other in tl.static_range(PARTS - 1, -1, -1):  # the last one holds the token itself
                theirs = cell + other * ROWS * (WIDTH + 2)
                other_sums = tl.load(
                    sums_ptr + theirs + query * WIDTH + place,
                    mask=is_place,
                    other=0.0,
                    volatile=True,
                )
                other_peak = tl.load(sums_ptr + theirs + ROWS * WIDTH + queries, volatile=True)
                other_total = tl.load(
                    sums_ptr + theirs + ROWS * (WIDTH + 1) + queries, volatile=True
                )
                higher = tl.maximum(peak, other_peak)
                shrink, grow = tl.exp(peak - higher), tl.exp(other_peak - higher)
                total = total * shrink + other_total * grow
                sums = sums * shrink[:, None] + other_sums * grow[:, None]
                peak = higher
        tl.store(
            out_ptr + row * KV_HEADS * GROUP * WIDTH + own + place,
            (sums / total[:, None]).to(narrow),
            mask=is_query,
        )
