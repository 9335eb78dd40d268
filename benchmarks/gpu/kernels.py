"""Every kernel of overland/kernels on a GPU: against float64, next to its plain twin, and how much
of the memory's speed it reaches: `python benchmarks/gpu/kernels.py [loss] [optimizer] [float8]`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from overland.kernels import float8
from overland.kernels.bfloat16 import join, split
from overland.kernels.float8 import E4M3, E5M2, cast_both, cast_plain, product, scale_for
from overland.kernels.gradients import (
    cross_entropy_,
    cross_entropy_plain_,
    scaled,
    scaled_plain,
    sum_of_squares,
    sum_of_squares_plain,
)
from overland.kernels.triton_kernels import TUNED
from overland.optimizers.adamw import update_adamw, update_plain
from overland.optimizers.elementwise import AdamW
from overland.optimizers.parameter_shard import ParameterShard, Step
from overland.optimizers.rule import Like
from tests.models.test_loss import chunked_cross_entropy, plain_cross_entropy

GPU = torch.device("cuda")


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def check_cross_entropy() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        logits = (torch.randn(300, 128256, device=GPU) * 3).to(dtype)
        labels = torch.randint(0, 128256, (300,), device=GPU)
        labels[::7] = -100
        exact = logits.double().requires_grad_()
        losses = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
        losses.sum().backward()
        for name, function in (("kernel", cross_entropy_), ("twin", cross_entropy_plain_)):
            got = logits.clone()
            row = function(got, labels, -100)
            print(f"cross-entropy {dtype} {name}: losses {error(row, losses.detach()):.1e}, "
                  f"gradient {error(got, exact.grad):.1e}")  # fmt: skip
    logits = torch.randn(8192, 128256, device=GPU, dtype=torch.bfloat16)
    labels = torch.randint(0, 128256, (8192,), device=GPU)
    for block, warps in ((2048, 4), (4096, 8), (8192, 8), (8192, 16), (8192, 32)):
        TUNED["cross_entropy"] = block, warps
        took = milliseconds(lambda: cross_entropy_(logits, labels, -100))
        print(f"cross-entropy block {block}, {warps} warps: {took:.2f} ms, "
              f"{4 * logits.numel() / took / 1e9:.2f} TB/s")  # fmt: skip


def check_loss() -> None:
    """The whole of head and loss, with its gradients, in one chunk and in several."""
    hidden = torch.randn(1, 4096, 512, device=GPU, dtype=torch.bfloat16)
    weight = torch.randn(32000, 512, device=GPU, dtype=torch.bfloat16) / 20
    labels = torch.randint(0, 32000, (1, 4096), device=GPU)
    labels[:, :50] = -100

    def gradients(loss: Callable[..., Tensor], dtype: torch.dtype, **options: int) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in (hidden.detach(), weight.detach())]
        value = loss(*inputs, labels, **options)
        (value / 4046).backward()
        return [value.detach(), *(x.grad for x in inputs if x.grad is not None)]

    exact = gradients(plain_cross_entropy, torch.float64)
    for chunk in (4096, 1000):
        got = gradients(chunked_cross_entropy, torch.bfloat16, chunk_tokens=chunk)
        errors = [f"{error(a, b):.1e}" for a, b in zip(got, exact, strict=True)]
        print(f"head and loss, chunks of {chunk}: loss and gradients off by {errors}")


def shard_of(
    parameter: Tensor, rest: Tensor | None, gradient: Tensor, kind: torch.dtype
) -> ParameterShard:
    state = {name: torch.zeros_like(parameter, dtype=kind) for name in ("exp_avg", "exp_avg_sq")}
    kinds = dict.fromkeys(state, Like())
    return ParameterShard("w", parameter, rest, gradient, kinds, state, {}, 1.0, 0.1, seed=3)


def step(count: int, divisor: float = 1.0, skip: float = 0.0) -> Step:
    numbers = (torch.tensor(one, device=GPU) for one in (float(count), divisor, skip))
    return Step(1e-3, *numbers)


def check_adamw() -> None:
    def state(size: int, kind: torch.dtype, in_halves: bool) -> ParameterShard:
        generator = torch.Generator(GPU).manual_seed(0)
        numbers = [torch.randn(size, device=GPU, generator=generator) for _ in range(2)]
        parameter, rest = split(numbers[0] * 0.02) if in_halves else (numbers[0] * 0.02, None)
        gradient = numbers[1].bfloat16() if in_halves else numbers[1]
        return shard_of(parameter, rest, gradient, kind)

    def master(it: ParameterShard) -> Tensor:
        return (it.parameter if it.remainder is None else join(it.parameter, it.remainder)).double()

    kinds = ((torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False))
    for kind, in_halves in kinds:
        for decoupled in (True, False):
            rule = AdamW(0.9, 0.999, bf16_moments=kind == torch.bfloat16, decoupled=decoupled)
            kernel, twin = (state(1_000_003, kind, in_halves) for _ in range(2))
            exact = torch.nn.Parameter(master(kernel))
            reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(
                [exact], lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1
            )
            start = exact.detach().clone()
            for count in range(1, 6):
                update_adamw(rule, [kernel], step(count, 2.5))
                update_adamw(rule, [kernel], step(count, 2.5, skip=1.0))
                update_plain(rule, [twin], step(count, 2.5))
                exact.grad = kernel.gradient.double() / 2.5
                reference.step()
            moved = exact.detach() - start
            for name, it in (("kernel", kernel), ("twin", twin)):
                off = error(master(it) - start, moved)
                means = [reference.state[exact][key] for key in it.state]
                moments = [
                    f"{error(a, b):.1e}, mean {float(a.double().mean() / b.mean() - 1):.1e}"
                    for a, b in zip(it.state.values(), means, strict=True)
                ]
                print(f"adamw {kind} halves={in_halves} decoupled={decoupled} {name}: "
                      f"movement off by {off:.1e}, moments by {moments}")  # fmt: skip
            differ = [
                float((one != twin.state[name]).double().mean())
                for name, one in kernel.state.items()
            ]
            print(f"adamw {kind} kernel and twin: shares of moments that differ {differ}")
    for (kind, in_halves), moved_bytes in zip(kinds, (26, 18, 20), strict=True):
        big = state(1 << 28, kind, in_halves)
        for block, warps in ((1024, 4), (2048, 8), (4096, 8), (2048, 4)):
            TUNED["adamw"] = block, warps
            rule, now = AdamW(0.9, 0.999, bf16_moments=kind == torch.bfloat16), step(1)
            took = milliseconds(lambda: update_adamw(rule, [big], now))  # noqa: B023
            print(f"adamw {kind} halves={in_halves} block {block}, {warps} warps: {took:.2f} ms, "
                  f"{moved_bytes * (1 << 28) / took / 1e9:.2f} TB/s")  # fmt: skip


def check_not_a_number() -> None:
    """It stays none wherever it is written, or a run that is broken would look sound."""
    one = torch.ones((), device=GPU)
    for kind in (torch.float32, torch.bfloat16):
        numbers = torch.full((100_000,), float("nan"), device=GPU)
        shard = shard_of(*split(torch.zeros_like(numbers)), numbers, kind)
        update_adamw(AdamW(0.9, 0.999, bf16_moments=kind == torch.bfloat16), [shard], step(1))
        kept = [bool(x.isnan().all()) for x in (shard.parameter, *shard.state.values())]
        print(f"adamw {kind}: not a number stays none in parameter and moments: {kept}")
    x = torch.full((256, 256), float("nan"), device=GPU, dtype=torch.bfloat16)
    kept = [bool(y.float().isnan().all()) for y in cast_both(x, one, E4M3)]
    print(f"float8 cast: not a number stays none: {kept}")


def check_norm_and_scale() -> None:
    sizes = (1 << 28, 1_000_003, 5)
    tensors = [torch.randn(size, device=GPU, dtype=torch.bfloat16) for size in sizes]
    exact = sum(t.double().square().sum() for t in tensors)
    for name, function in (("kernel", sum_of_squares), ("twin", sum_of_squares_plain)):
        got = function(tensors)
        took = milliseconds(lambda function=function: function(tensors))
        print(f"sum of squares {name}: off by {abs(got.item() / exact.item() - 1):.1e}, "
              f"{took:.2f} ms, {2 * sum(sizes) / took / 1e9:.2f} TB/s")  # fmt: skip
    wide, factor = torch.randn(1 << 28, device=GPU), torch.tensor(1 / 3, device=GPU)
    for name, function in (("kernel", scaled), ("twin", scaled_plain)):
        equal = torch.equal(
            function(wide, factor, torch.bfloat16), scaled_plain(wide, factor, torch.bfloat16)
        )
        took = milliseconds(lambda function=function: function(wide, factor, torch.bfloat16))
        print(f"scaled {name}: equal {equal}, {took:.2f} ms")


def check_float8() -> None:
    for shape in ((8192, 4096), (1000, 336)):
        for dtype in (E4M3, E5M2):
            x = torch.randn(shape, device=GPU, dtype=torch.bfloat16) * 3
            scale = scale_for(x, dtype)
            twin = cast_plain(x, scale, dtype, True, True)
            equal = [
                torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                for a, b in zip(cast_both(x, scale, dtype), twin, strict=True)
            ]
            print(f"float8 cast {shape} {dtype}: equal {equal}")
    x = torch.randn(8192, 14336, device=GPU, dtype=torch.bfloat16)
    scale = scale_for(x, E4M3)
    for block, warps in ((64, 4), (128, 4), (128, 8), (128, 16)):
        TUNED["float8"] = block, warps
        for rows, columns in ((True, True), (True, False), (False, True)):
            cast = torch.ops.overland.float8_cast
            took = milliseconds(lambda: cast(x, scale, E4M3, rows, columns))  # noqa: B023
            moved = (2 + rows + columns) * x.numel()
            print(f"float8 cast block {block}, {warps} warps, rows {rows}, columns {columns}: "
                  f"{took:.3f} ms, {moved / took / 1e9:.2f} TB/s")  # fmt: skip


def check_float8_product() -> None:
    """The three products of an 8B model's layers, by kind of number and of sum."""
    tokens, wide = 8192, 14336
    for m, n, k in ((tokens, wide, 4096), (tokens, 4096, wide), (wide, 4096, tokens),
                    (tokens, 4096, 4096), (tokens, 1024, 4096)):  # fmt: skip
        a = torch.randn(m, k, device=GPU, dtype=torch.bfloat16)
        b = torch.randn(n, k, device=GPU, dtype=torch.bfloat16)
        exact = a[:512].double() @ b.double().t()
        took = milliseconds(lambda: a @ b.t(), 40)  # noqa: B023
        row = [f"bf16 {2 * m * n * k / took / 1e9:.0f} ({error((a @ b.t())[:512], exact):.1e})"]
        for dtype in (E4M3, E5M2):
            scales = scale_for(a, dtype), scale_for(b, E4M3)
            a8 = cast_both(a, scales[0], dtype)[0]
            b8 = cast_both(b, scales[1], E4M3)[0]
            summed = a8[:512].double() @ b8.double().t() / (scales[0] * scales[1])
            for fast in (True, False):
                float8.FAST_SUMS = fast
                multiply = lambda: product(a8, b8, *scales, torch.bfloat16)  # noqa: B023
                took = milliseconds(multiply, 40)
                row.append(
                    f"{str(dtype)[13:17]} {'fast' if fast else 'exact'} "
                    f"{2 * m * n * k / took / 1e9:.0f} ({error(multiply()[:512], exact):.1e}, "
                    f"of its sums {error(multiply()[:512], summed):.1e})"
                )
        print(f"product {m} × {n} × {k}, TFLOP/s (error): " + ", ".join(row))


CHECKS = {
    "loss": (check_cross_entropy, check_loss),
    "optimizer": (check_adamw, check_not_a_number, check_norm_and_scale),
    "float8": (check_float8, check_float8_product),
}

if __name__ == "__main__":
    torch.manual_seed(0)
    print(torch.__version__, torch.cuda.get_device_name())
    for name in sys.argv[1:] or CHECKS:
        for check in CHECKS[name]:
            check()
            torch.cuda.empty_cache()
