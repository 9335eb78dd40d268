"""Kernels of the local world. Their names let a profile tell them from a trainer's own copies.

`network_begin` reserves the links for some time, from when they are free, and `network_end` waits
until its end, by the device's timer, which counts nanoseconds whatever its clock does.
"""

import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def local_gather(rows, mine, size, num_rows, BLOCK: tl.constexpr):
    """Copies `mine` into every row."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    values = tl.load(mine + places, inside)
    for row in range(num_rows):
        tl.store(rows + row * size + places, values, inside)


@triton.jit
def local_slice(output, given, size, factor, BLOCK: tl.constexpr):
    """Copies the beginning of `given`, as the sum over ranks that all hold the same."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    values = tl.load(given + places, inside)
    tl.store(output + places, (values * factor).to(values.dtype), inside)


@triton.jit
def _now():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["nanoseconds"])
def network_begin(busy_until, end, nanoseconds):
    tl.atomic_max(busy_until, _now())
    tl.store(end, tl.atomic_add(busy_until, nanoseconds.to(tl.int64)) + nanoseconds)


@triton.jit
def network_end(end):
    until = tl.load(end)
    now = _now()
    while now < until:
        now = _now()
    tl.store(end, now)  # so that no compiler takes the loop for useless
