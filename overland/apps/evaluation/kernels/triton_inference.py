"""The Triton versions of products, norms and activations in layers.py, whose plain definitions
specify what they compute.

They run at memory speed if no time is lost between them: from Hopper on, a kernel lets the next one
start while its last programs still run (`gdc_launch_dependents`), and the next one waits for its
results (`gdc_wait`) after it has begun to load its weights.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FEWEST = 16  # rows and columns that tensor cores multiply at once
LONGEST = 4096  # elements of a row that a program holds at once


def linear(x_BD: Tensor, weight_ND: Tensor, bias_N: Tensor | None) -> Tensor:
    out_BN = x_BD.new_empty((len(x_BD), len(weight_ND)))
    return _launch(x_BD, weight_ND, bias_N, out_BN, is_gated=False)


def gated(x_BD: Tensor, weight_2FD: Tensor) -> Tensor:
    out_BF = x_BD.new_empty((len(x_BD), len(weight_2FD) // 2))
    return _launch(x_BD, weight_2FD, None, out_BF, is_gated=True)


def add_norm(
    x_BD: Tensor, more_BD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    batch, width = x_BD.shape
    sum_BD = x_BD if more_BD is None else torch.empty_like(x_BD)
    out_BD = torch.empty_like(x_BD)
    _add_norm[(batch,)](
        x_BD, more_BD, weight_D, sum_BD, out_BD, width, eps,
        BLOCK=triton.next_power_of_2(width), num_warps=8, **early(x_BD),
    )  # fmt: skip
    return sum_BD, out_BD


def silu_times(both_B2F: Tensor) -> Tensor:
    rows, width = both_B2F.shape[0], both_B2F.shape[1] // 2
    out_BF = both_B2F.new_empty((rows, width))
    block = min(2048, triton.next_power_of_2(width))
    _silu_times_rows[(rows, triton.cdiv(width, block))](
        both_B2F, out_BF, width, BLOCK=block, num_warps=4
    )
    return out_BF


class Tile(NamedTuple):
    """How a product of several rows is tiled, tuned on an H200 with 64 rows."""

    block: int  # rows of the matrix per program
    depth: int  # columns processed at a time
    stages: int  # of these loaded ahead
    parts: int = 1  # programs that share a row
    warps: int = 4


def _tile(num_outputs: int, width: int, is_gated: bool) -> Tile:
    if is_gated:
        return Tile(64, 64, 4)
    if num_outputs >= 16384:
        return Tile(128, 128, 2, warps=8)
    if num_outputs > 4096:
        return Tile(64, 128, 4)
    if width >= 8192 and width % 256 == 0:
        return Tile(64, 128, 4, parts=2)
    return Tile(32, 128, 6)


def _launch(
    x_BD: Tensor, weight_ND: Tensor, bias_N: Tensor | None, out_BN: Tensor, is_gated: bool
) -> Tensor:
    rows, width = x_BD.shape
    num_outputs = out_BN.shape[1]
    if rows == 1:
        is_even = width % LONGEST == 0 and not is_gated
        block = LONGEST if is_even else min(LONGEST // 2, triton.next_power_of_2(width))
        _product[(num_outputs,)](
            x_BD, weight_ND, bias_N, out_BN, num_outputs, width, BLOCK=block, GATED=is_gated,
            num_warps=4, **early(x_BD),
        )  # fmt: skip
        return out_BN
    tile = _tile(num_outputs, width, is_gated)
    padded = max(FEWEST, triton.next_power_of_2(rows))
    blocks = triton.cdiv(num_outputs, tile.block)
    sums, ended = scratch(x_BD.device)
    needed = blocks * tile.parts * padded * tile.block
    assert tile.parts == 1 or (needed <= sums.numel() and blocks <= len(ended))
    _products[(blocks, tile.parts)](
        x_BD, weight_ND, bias_N, out_BN, sums, ended, rows, num_outputs, width,
        ROWS=padded, BLOCK=tile.block, DEPTH=tile.depth, STAGES=tile.stages, PARTS=tile.parts,
        GATED=is_gated, num_warps=tile.warps, **early(x_BD),
    )  # fmt: skip
    return out_BN


@cache
def scratch(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns buffers for the sums of programs that share work, and for the number of programs that
    have ended, which is zero between kernels."""
    sums = torch.empty(2**21, dtype=torch.float32, device=device)
    return sums, torch.zeros(2**14, dtype=torch.int32, device=device)


def early(tensor: Tensor) -> dict[str, Any]:
    is_early = tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if is_early else {"EARLY": False}


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_outputs,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiplies one row by one row of the matrix, or of the gate and of the gated matrix."""
    output = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((BLOCK,), tl.float32)
    ups = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < WIDTH
        weight = tl.load(weight_ptr + output * WIDTH + place, mask=inside, other=0.0)
        if GATED:
            up_ptrs = weight_ptr + (num_outputs + output) * WIDTH + place
            up = tl.load(up_ptrs, mask=inside, other=0.0)
        if EARLY and start == 0:
            tl.extra.cuda.gdc_wait()
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        sums += weight.to(tl.float32) * x
        if GATED:
            ups += up.to(tl.float32) * x
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.sum(sums)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + output).to(tl.float32)
    if GATED:
        total = _silu_times(total, tl.sum(ups), out_ptr.dtype.element_ty)
    tl.store(out_ptr + output, total.to(out_ptr.dtype.element_ty))


@triton.jit
def _silu_times(gate, up, narrow: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounds wherever separate layers would round."""
    gate = gate.to(narrow).to(tl.float32)
    gate = (gate / (1 + tl.exp(-gate))).to(narrow).to(tl.float32)
    return (gate * up.to(narrow).to(tl.float32)).to(narrow)


@triton.jit
def _silu_times_rows(both_ptr, out_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    gate = tl.load(both_ptr + row * 2 * width + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + (row * 2 + 1) * width + place, mask=inside, other=0.0)
    out = _silu_times(gate, up, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + place, out, mask=inside)


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, out_ptr, sums_ptr, ended_ptr, rows, num_outputs, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiplies all rows by BLOCK rows of the matrix, or by a part of them."""
    block, part = tl.program_id(0), tl.program_id(1)
    narrow = out_ptr.dtype.element_ty
    output = block * BLOCK + tl.arange(0, BLOCK)
    row, depth = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    is_row, is_output = row[:, None] < rows, output[:, None] < num_outputs
    share = width // PARTS
    x_ptrs = x_ptr + row[:, None] * width + depth[None, :] + part * share
    weight_ptrs = weight_ptr + output[:, None].to(tl.int64) * width + depth[None, :] + part * share
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    ups = tl.zeros((ROWS, BLOCK), tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for start in tl.range(0, share, DEPTH, num_stages=STAGES):
        is_inside = depth[None, :] < share - start
        weight = tl.load(weight_ptrs + start, mask=is_output & is_inside, other=0.0)
        x = tl.load(x_ptrs + start, mask=is_row & is_inside, other=0.0)
        sums = tl.dot(x, weight.T, sums)
        if GATED:
            up_ptrs = weight_ptrs + num_outputs.to(tl.int64) * width + start
            up = tl.load(up_ptrs, mask=is_output & is_inside, other=0.0)
            ups = tl.dot(x, up.T, ups)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()

    is_mine = True
    if PARTS > 1:
        cell = block * PARTS * ROWS * BLOCK + row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(sums_ptr + cell + part * ROWS * BLOCK, sums)
        is_mine = is_last(ended_ptr + block, PARTS)
    if is_mine:
        if PARTS > 1:  # always in the same order
            sums = tl.load(sums_ptr + cell, volatile=True)
            for other in tl.static_range(1, PARTS):
                sums += tl.load(sums_ptr + cell + other * ROWS * BLOCK, volatile=True)
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + output, mask=output < num_outputs, other=0.0).to(tl.float32)[
                None, :
            ]
        out = sums.to(narrow)
        if GATED:
            out = _silu_times(sums, ups, narrow)
        place = row[:, None] * num_outputs + output[None, :]
        tl.store(out_ptr + place, out, mask=is_row & (output[None, :] < num_outputs))


@triton.jit
def is_last(ended_ptr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether all others that share this work have stored their sums; resets the count."""
    tl.debug_barrier()
    ended = tl.atomic_add(ended_ptr, 1, sem="acq_rel")
    tl.debug_barrier()
    is_all = ended == PARTS - 1
    if is_all:
        tl.store(ended_ptr, 0)
    return is_all


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    x_ptr, more_ptr, weight_ptr, sum_ptr, out_ptr, width, eps,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * width
    narrow = out_ptr.dtype.element_ty
    place = tl.arange(0, BLOCK)
    inside = place < width
    weight = tl.load(weight_ptr + place, mask=inside, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row + place, mask=inside, other=0.0).to(tl.float32)
    if more_ptr is not None:
        x += tl.load(more_ptr + row + place, mask=inside, other=0.0).to(tl.float32)
        x = x.to(narrow).to(tl.float32)
        tl.store(sum_ptr + row + place, x.to(narrow), mask=inside)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    normed = x * tl.rsqrt(tl.sum(x * x) / width + eps)
    out = weight.to(tl.float32) * normed.to(narrow).to(tl.float32)
    tl.store(out_ptr + row + place, out.to(narrow), mask=inside)
