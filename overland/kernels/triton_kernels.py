"""The Triton versions of the training kernels (AdamW, cross-entropy, 8-bit casts, 4-bit unpacking,
sums of squares), whose plain definitions specify what they compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from overland.kernels.bfloat16 import Places

# (elements of a block, warps), tuned with benchmarks/gpu/kernels.py.
TUNED = {
    "adamw": (2048, 8),  # 8 elements per thread: 16-bit numbers move in 16-byte pieces
    "cross_entropy": (8192, 16),
    # 128 elements of 8 bits are a whole cache line, in both directions.
    "float8": (128, 8),
    "nf4": (512, 2),  # of two weights each
    "norm": (4096, 8),
    "scale": (4096, 8),
}
ROUNDS = 4  # blocks of a tensor that one program of the norm sums
PIECE = TUNED["norm"][0] * ROUNDS


def launch_adamw(
    parameter: Tensor,  # with a remainder, the bits of bfloat16 in int16; otherwise float32
    remainder: Tensor | None,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    numbers: Tensor,  # divisor, skip, step size, root of the second bias correction, count
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    number: int,
    places: Places,
    decoupled: bool,
) -> None:
    """Updates one parameter, split or whole: every element is read and written once."""
    block, warps = TUNED["adamw"]
    assert parameter.numel() < 1 << 32 or places.columns == places.stride
    _update[(triton.cdiv(parameter.numel(), block),)](
        parameter,
        parameter if remainder is None else remainder,
        gradient,
        exp_avg,
        exp_avg_sq,
        numbers,
        parameter.numel(),
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        decay,
        number,
        *places,
        SPLIT=remainder is not None,
        NARROW=exp_avg.dtype == torch.bfloat16,
        DECOUPLED=decoupled,
        WHOLE_ROWS=places.columns == places.stride,
        BLOCK=block,
        num_warps=warps,
    )


@triton.jit(do_not_specialize=["number", "first", "columns", "stride"])
def _update(  # type: ignore[no-untyped-def]
    parameter_ptr,
    remainder_ptr,
    gradient_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    numbers_ptr,
    size,
    beta1,
    keep1,
    beta2,
    keep2,
    eps,
    decay,
    number,
    first,
    columns,
    stride,
    SPLIT: tl.constexpr,
    NARROW: tl.constexpr,
    DECOUPLED: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    skip = tl.load(numbers_ptr + 1)
    if skip == 0.0:
        divisor = tl.load(numbers_ptr)
        step_size = tl.load(numbers_ptr + 2)
        root = tl.load(numbers_ptr + 3)
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < size

        if SPLIT:
            upper = tl.load(parameter_ptr + place, mask=inside, other=0).to(tl.int32)
            remainder = tl.load(remainder_ptr + place, mask=inside, other=0).to(tl.int32)
            is_zero = (upper & 0x7FFF) == 0  # see `join` in bfloat16.py
            remainder = tl.where(is_zero & (remainder < 0), 0, remainder)
            wide = ((upper << 16) + remainder).to(tl.float32, bitcast=True)
        else:
            wide = tl.load(parameter_ptr + place, mask=inside, other=0.0)
        gradient = tl.load(gradient_ptr + place, mask=inside, other=0.0).to(tl.float32) / divisor
        exp_avg = tl.load(exp_avg_ptr + place, mask=inside, other=0.0).to(tl.float32)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + place, mask=inside, other=0.0).to(tl.float32)

        if DECOUPLED:
            wide -= decay * wide
        else:
            gradient += decay * wide
        exp_avg = beta1 * exp_avg + keep1 * gradient
        exp_avg_sq = beta2 * exp_avg_sq + keep2 * gradient * gradient
        wide -= step_size * exp_avg / (tl.sqrt(exp_avg_sq) / root + eps)

        if SPLIT:
            bits = tl.where(wide == wide, wide.to(tl.int32, bitcast=True), 0x7FC00000)
            upper = (bits + 32768) >> 16
            remainder = bits - (upper << 16)
            tl.store(parameter_ptr + place, upper.to(tl.int16), mask=inside)
            tl.store(remainder_ptr + place, remainder.to(tl.int16), mask=inside)
        else:
            tl.store(parameter_ptr + place, wide, mask=inside)
        if NARROW:  # the same random bits as in bfloat16.py
            count = tl.load(numbers_ptr + 4).to(tl.uint32)
            key = _mix(count * 0x9E3779B9 + number.to(tl.uint32))
            in_whole = place.to(tl.uint32)
            if not WHOLE_ROWS:  # divided in 32 bits: in 64 it would take longer than the memory
                row = in_whole // columns.to(tl.uint32)
                in_whole += row * (stride - columns).to(tl.uint32)
            chance = _mix((in_whole + first.to(tl.uint32)) ^ key)
            exp_avg = _round_stochastically(exp_avg, chance & 0xFFFF)
            exp_avg_sq = _round_stochastically(exp_avg_sq, chance >> 16)
        tl.store(exp_avg_ptr + place, exp_avg, mask=inside)
        tl.store(exp_avg_sq_ptr + place, exp_avg_sq, mask=inside)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _round_stochastically(wide, bits):  # type: ignore[no-untyped-def]
    bits = tl.where(wide == wide, bits, 0)  # otherwise NaN may overflow
    carried = wide.to(tl.uint32, bitcast=True) + bits
    return (carried >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


def cross_entropy_triton_(logits_CV: Tensor, labels_C: Tensor, ignored: int) -> Tensor:
    """Runs one program per row, with two passes over it."""
    assert logits_CV.stride(1) == 1
    block, warps = TUNED["cross_entropy"]
    losses_C = torch.empty(len(logits_CV), dtype=torch.float32, device=logits_CV.device)
    if len(logits_CV):
        _cross_entropy[(len(logits_CV),)](
            logits_CV,
            labels_C,
            losses_C,
            logits_CV.stride(0),
            logits_CV.shape[1],
            ignored,
            BLOCK=block,
            num_warps=warps,
        )
    return losses_C


@triton.jit
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits_ptr, labels_ptr, losses_ptr, stride, num_classes, ignored, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    is_valid = label != ignored
    places = tl.arange(0, BLOCK)

    largest = -float("inf")
    total = 0.0
    for start in range(0, num_classes, BLOCK):
        inside = start + places < num_classes
        x = tl.load(logits_ptr + start + places, mask=inside, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    log_sum = largest + tl.log(total)

    x_label = tl.load(logits_ptr + label, mask=is_valid, other=0.0).to(tl.float32)
    tl.store(losses_ptr + row, tl.where(is_valid, log_sum - x_label, 0.0))
    tl.debug_barrier()  # the label's logit is read by every warp before any warp overwrites it

    # In reverse: what was read last is most likely still in the cache.
    num_blocks = tl.cdiv(num_classes, BLOCK)
    for block in range(num_blocks):
        start = (num_blocks - 1 - block) * BLOCK
        inside = start + places < num_classes
        x = tl.load(logits_ptr + start + places, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.exp(x - log_sum) - tl.where(start + places == label, 1.0, 0.0)
        gradient = tl.where(is_valid, gradient, 0.0)
        tl.store(logits_ptr + start + places, gradient, mask=inside)


def cast_triton(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor, Tensor]:
    """Reads each tile once and writes it as it is, transposed, or both."""
    block, warps = TUNED["float8"]
    height, width = x.shape
    as_it_is = torch.empty((height, width) if rows else 0, dtype=dtype, device=x.device)
    turned = torch.empty((width, height) if columns else 0, dtype=dtype, device=x.device)
    if x.numel():
        _cast[(triton.cdiv(height, block), triton.cdiv(width, block))](
            x,
            as_it_is,
            turned,
            scale,
            height,
            width,
            x.stride(0),
            x.stride(1),
            MOST=torch.finfo(dtype).max,
            ROWS=rows,
            COLUMNS=columns,
            BLOCK=block,
            num_warps=warps,
        )
    return as_it_is, turned


@triton.jit
def _cast(  # type: ignore[no-untyped-def]
    x_ptr,
    rows_ptr,
    columns_ptr,
    scale_ptr,
    height,
    width,
    stride,
    step,
    MOST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < height)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride + column[None, :] * step, mask=inside, other=0.0)
    x = x.to(tl.float32) * tl.load(scale_ptr)
    # Keeps NaN: minimum and maximum would turn it into a large number.
    x = tl.where(x > MOST, MOST, tl.where(x < -MOST, -MOST, x))
    if ROWS:
        at = row[:, None] * width + column[None, :]
        tl.store(rows_ptr + at, x.to(rows_ptr.dtype.element_ty), mask=inside)
    if COLUMNS:
        at = column[:, None] * height + row[None, :]
        turned = tl.trans(x.to(columns_ptr.dtype.element_ty))
        tl.store(columns_ptr + at, turned, mask=tl.trans(inside))


def unpack_triton(
    packed: Tensor, width: int, levels: Tensor, group: int, dtype: torch.dtype
) -> Tensor:
    """Runs a program for each piece of a row. `group`: the number of weights that share a scale."""
    assert packed.is_contiguous()
    block, warps = TUNED["nf4"]
    height = len(packed)
    weight_OD = torch.empty((height, width), dtype=dtype, device=packed.device)
    if height:
        _unpack[(height, triton.cdiv(width // 2, block))](
            packed,
            packed.view(torch.bfloat16),
            levels,
            weight_OD,
            width // 2,
            packed.shape[1],
            GROUP=group // 2,
            BLOCK=block,
            num_warps=warps,
        )
    return weight_OD


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    packed_ptr,
    scales_ptr,
    levels_ptr,
    weight_ptr,
    num_pairs,
    row_bytes,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_pairs
    pairs = tl.load(packed_ptr + row * row_bytes + places, mask=inside, other=0).to(tl.int32)
    first_scale = (row * row_bytes + num_pairs) // 2
    scale = tl.load(scales_ptr + first_scale + places // GROUP, mask=inside, other=0.0)
    upper = tl.load(levels_ptr + (pairs >> 4)) * scale.to(tl.float32)
    lower = tl.load(levels_ptr + (pairs & 15)) * scale.to(tl.float32)
    both = tl.interleave(upper, lower).to(weight_ptr.dtype.element_ty)
    columns = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    tl.store(weight_ptr + row * 2 * num_pairs + columns, both, mask=columns < 2 * num_pairs)


def sum_of_squares_triton(tensors: Sequence[Tensor]) -> Tensor:
    """Sums each piece of each tensor, then those sums, without atomic additions, so that the same
    gradients give the same bits."""
    block, warps = TUNED["norm"]
    counts = [triton.cdiv(tensor.numel(), PIECE) for tensor in tensors]
    sums = torch.empty(sum(counts), dtype=torch.float32, device=tensors[0].device)
    start = 0
    for tensor, count in zip(tensors, counts, strict=True):
        if count:
            part = sums[start:]
            _sum_of_squares[(count,)](
                tensor.contiguous(), part, tensor.numel(), block, ROUNDS, num_warps=warps
            )
        start += count
    return sums.sum()


@triton.jit
def _sum_of_squares(  # type: ignore[no-untyped-def]
    tensor_ptr, sums_ptr, size, BLOCK: tl.constexpr, ROUNDS: tl.constexpr
):
    piece = tl.program_id(0).to(tl.int64)
    places = piece * BLOCK * ROUNDS + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for turn in tl.static_range(ROUNDS):
        at = places + turn * BLOCK
        x = tl.load(tensor_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        total += x * x
    tl.store(sums_ptr + piece, tl.sum(total, 0))


def scaled_triton(wide: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    block, warps = TUNED["scale"]
    narrow = torch.empty_like(wide, dtype=dtype)
    if wide.numel():
        blocks = triton.cdiv(wide.numel(), block)
        _scaled[(blocks,)](wide, narrow, factor, wide.numel(), block, num_warps=warps)
    return narrow


@triton.jit
def _scaled(wide_ptr, narrow_ptr, factor_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    x = tl.load(wide_ptr + places, mask=inside) * tl.load(factor_ptr).to(tl.float32)
    tl.store(narrow_ptr + places, x, mask=inside)
