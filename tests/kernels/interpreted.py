"""What the Triton kernels compute, compared with their plain definitions and with float64.

Run by test_triton.py, in Triton's interpreter. It cuts off digits where a GPU rounds to the nearest
number, and loses its way where an 8-bit one is rounded up: numbers that fit are compared exactly,
others within one step of their type. On a GPU, benchmarks/gpu/kernels.py compares all bits.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from overland import kernels
from overland.kernels import triton_kernels
from overland.kernels.bfloat16 import Places, join, split
from overland.kernels.float8 import E4M3, E5M2, cast_plain
from overland.kernels.gradients import cross_entropy_plain_, scaled_plain, sum_of_squares_plain
from overland.kernels.nf4 import BLOCK, LEVELS, pack, unpack_plain
from overland.kernels.triton_kernels import (
    PIECE,
    cast_triton,
    cross_entropy_triton_,
    scaled_triton,
    sum_of_squares_triton,
    unpack_triton,
)
from overland.optimizers import adamw
from overland.optimizers.adamw import update_adamw, update_plain, update_triton
from overland.optimizers.elementwise import AdamW
from overland.optimizers.parameter_shard import ParameterShard, Step
from overland.optimizers.rule import Like
from overland.training import kernel_trials

# optimizer


def shard_of(shape: tuple[int, ...], moments: torch.dtype, in_halves: bool) -> ParameterShard:
    torch.manual_seed(0)
    wide = torch.randn(shape) * 0.02
    narrow, rest = split(wide)
    state = {name: torch.zeros(shape, dtype=moments) for name in ("exp_avg", "exp_avg_sq")}
    gradient, kinds = torch.randn(shape).bfloat16(), dict.fromkeys(state, Like())
    if in_halves:
        return ParameterShard("w", narrow, rest, gradient, kinds, state, {}, 1.0, 0.1, seed=3)
    return ParameterShard("w", wide, None, gradient.float(), kinds, state, {}, 1.0, 0.1, seed=3)


def step(count: int, divisor: float = 1.0, skip: float = 0.0) -> Step:
    return Step(1e-3, torch.tensor(float(count)), torch.tensor(divisor), torch.tensor(skip))


def master(state: ParameterShard) -> Tensor:
    whole = state.parameter if state.remainder is None else join(state.parameter, state.remainder)
    return whole.double()


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("in_halves", [True, False])
def test_update(moments: torch.dtype, decoupled: bool, in_halves: bool) -> None:
    rule = AdamW(beta2=0.999, decoupled=decoupled)
    kernel, twin = (shard_of((61, 67), moments, in_halves) for _ in range(2))
    exact = torch.nn.Parameter(master(kernel))
    start = exact.detach().clone()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = kind([exact], lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1)
    for count in range(1, 6):
        update_triton(rule, [kernel], step(count, 2.5))
        before = [one.clone() for one in (kernel.parameter, *kernel.state.values())]
        update_triton(rule, [kernel], step(count, 2.5, skip=1.0))
        assert all(map(torch.equal, before, (kernel.parameter, *kernel.state.values())))
        update_plain(rule, [twin], step(count, 2.5))
        exact.grad = kernel.gradient.double() / 2.5
        reference.step()
    moved = (exact.detach() - start).norm()
    bound = 2e-5 if moments == torch.float32 else 3e-3
    for one in (kernel, twin):
        assert (master(one) - exact.detach()).norm() / moved < bound
    for one, other in zip(kernel.state.values(), twin.state.values(), strict=True):
        # Float32 sums may differ in the last bit, and chance then tips a few numbers the other way.
        assert (one != other).double().mean() < (0.01 if moments == torch.bfloat16 else 1)
        torch.testing.assert_close(one, other, rtol=2**-7, atol=0)


@pytest.mark.parametrize("places", [Places(5000), Places(1 << 20, 67, 268)])
def test_a_shard_is_rounded_by_its_place_in_the_whole_parameter(places: Places) -> None:
    kernel, twin = (
        replace(shard_of((61, 67), torch.bfloat16, in_halves=True), places=places) for _ in range(2)
    )
    update_triton(AdamW(beta2=0.999), [kernel], step(1))
    update_plain(AdamW(beta2=0.999), [twin], step(1))
    for one, other in zip(kernel.state.values(), twin.state.values(), strict=True):
        assert (one != other).double().mean() < 0.01


@pytest.mark.parametrize("in_halves", [True, False])
def test_a_gradient_may_lie_the_other_way_round_and_a_shard_be_empty(
    in_halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_it_is, turned = (shard_of((61, 67), torch.float32, in_halves) for _ in range(2))
    turned = replace(turned, gradient=turned.gradient.t().contiguous().t())
    empty = shard_of((0, 67), torch.float32, in_halves)
    monkeypatch.setattr(adamw, "triton_takes", lambda tensor, kernel: True)
    for some in ([empty, as_it_is], [turned, empty]):
        update_adamw(AdamW(beta2=0.999, bf16_moments=True), some, step(1))
    assert torch.equal(master(as_it_is), master(turned))


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_halves", [True, False])
def test_what_is_not_a_number_stays_none(moments: torch.dtype, in_halves: bool) -> None:
    """Or a run that is broken would look sound. All bits are 1, as in a GPU's own."""
    bad = torch.full((3000,), -1, dtype=torch.int32).view(torch.float32)
    state = replace(shard_of((3000,), moments, in_halves), gradient=bad)
    update_triton(AdamW(beta2=0.999), [state], step(5))
    for tensor in (state.parameter, *state.state.values()):
        assert tensor.isnan().all()


def test_a_weight_that_was_zeroed_in_place_is_updated_from_zero() -> None:
    kernel, twin = (shard_of((61, 67), torch.float32, in_halves=True) for _ in range(2))
    for one in (kernel, twin):
        one.parameter.mul_(0)  # zeros of both signs, with remainders of both
    update_triton(AdamW(beta2=0.999), [kernel], step(1))
    update_plain(AdamW(beta2=0.999), [twin], step(1))
    assert torch.allclose(master(kernel), -1e-3 * kernel.gradient.double().sign(), rtol=1e-3)
    torch.testing.assert_close(master(kernel), master(twin), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sum_of_squares(dtype: torch.dtype) -> None:
    sizes = (PIECE + 5, PIECE, 3, 0)
    tensors = [torch.randn(size).to(dtype) for size in sizes] + [torch.randn(40, 30).to(dtype).t()]
    exact = sum(tensor.double().square().sum() for tensor in tensors)
    for function in (sum_of_squares_triton, sum_of_squares_plain):
        assert float(function(tensors)) == pytest.approx(float(exact), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scaled(dtype: torch.dtype) -> None:
    fits = torch.randint(-50, 50, (71, 67)).float()
    for wide, factor, steps in ((fits, torch.tensor(0.25), 0), (fits, torch.tensor(1 / 3), 1)):
        got, twin = (function(wide, factor, dtype) for function in (scaled_triton, scaled_plain))
        torch.testing.assert_close(got, twin, rtol=steps * torch.finfo(dtype).eps, atol=0)
    assert scaled_triton(wide[:0], factor, dtype).shape == (0, 67)


# loss


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_classes", [100, 8192, 20_001])
def test_cross_entropy(dtype: torch.dtype, num_classes: int) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(9, num_classes) * 3).to(dtype)
    labels = torch.randint(0, num_classes, (9,))
    labels[[0, 5]] = -100
    labels[1], labels[2] = 0, num_classes - 1
    exact = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    losses.sum().backward()
    assert exact.grad is not None
    for function in (cross_entropy_triton_, cross_entropy_plain_):
        got = logits.clone()
        torch.testing.assert_close(
            function(got, labels, -100).double(), losses.detach(), rtol=1e-5, atol=1e-5
        )
        rounding = 2**-7 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got.double(), exact.grad, rtol=rounding, atol=1e-6)
        assert not got[labels == -100].any()
    assert cross_entropy_triton_(logits[:0], labels[:0], -100).shape == (0,)


def test_cross_entropy_of_rows_of_a_wider_tensor() -> None:
    whole = torch.randn(4, 64)
    rows, beyond = whole[:, :50].clone(), whole[:, 50:].clone()
    labels = torch.tensor([0, 49, 7, -100])
    losses = cross_entropy_triton_(whole[:, :50], labels, -100)
    torch.testing.assert_close(losses, cross_entropy_plain_(rows, labels, -100))
    torch.testing.assert_close(whole[:, :50], rows)
    assert torch.equal(whole[:, 50:], beyond)


# 8-bit numbers


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(128, 256), (100, 37), (0, 16)])
@pytest.mark.parametrize("turned", [False, True])
def test_float8_cast(dtype: torch.dtype, shape: tuple[int, int], turned: bool) -> None:
    torch.manual_seed(0)
    fits = torch.randint(-4, 5, shape).bfloat16()
    beyond = torch.full(shape, 1e30).bfloat16() * fits.sign()
    for x, scale in ((fits, torch.tensor(8.0)), (beyond, torch.tensor(1.0))):
        x = x.t() if turned else x
        for rows, columns in ((True, True), (True, False), (False, True)):
            got = cast_triton(x, scale, dtype, rows, columns)
            for one, other in zip(got, cast_plain(x, scale, dtype, rows, columns), strict=True):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# 4-bit numbers


@pytest.mark.parametrize("shape", [(3, 64), (5, 4096), (2, 4160), (0, 128)])
def test_nf4_unpack(shape: tuple[int, int]) -> None:
    packed = pack(torch.randn(shape) * torch.logspace(-9, 9, shape[1]))
    got = unpack_triton(packed, shape[1], torch.tensor(LEVELS), BLOCK, torch.float32)
    assert torch.equal(got, unpack_plain(packed, torch.float32))


# trials


@pytest.mark.parametrize("name", kernel_trials.TRIALS)
def test_a_kernel_that_agrees_passes_its_trial(name: str) -> None:
    assert kernel_trials.problem_of(name, torch.device("cpu")) == ""


def test_only_kernels_that_agree_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(wide: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        return scaled_plain(wide, factor, dtype) * 1.02

    def broken(tensors: list[Tensor]) -> Tensor:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(triton_kernels, "scaled_triton", wrong)
    monkeypatch.setattr(triton_kernels, "sum_of_squares_triton", broken)
    monkeypatch.setattr(kernels, "_in_use", ())
    names = ["adamw", "norm", "scale"]
    problems = {name: kernel_trials.problem_of(name, torch.device("cpu")) for name in names}
    line = kernel_trials.earned(names, [("", {}), ("a new GPU", problems)])
    assert [name for name in kernels.KERNELS if kernels.is_used(name)] == ["adamw"]
    assert line.startswith("our kernels on a new GPU: adamw agrees with PyTorch and is used; ")
    assert "norm is not used (rank 1: no such instruction)" in line
    assert "scale is not used (rank 1: Tensor-likes are not close!)" in line
    assert kernel_trials.earned(names, [("", {}), ("", {})]) == ""  # measured everywhere
