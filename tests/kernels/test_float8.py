"""8-bit casts and products: what they keep, what they lose, and what they do with odd values."""

from __future__ import annotations

import pytest
import torch

from overland.kernels.float8 import (
    E4M3,
    E5M2,
    cast,
    cast_both,
    cast_transposed,
    product,
    scale_for,
)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_largest_number_is_at_the_end_of_the_range(dtype: torch.dtype) -> None:
    x = torch.randn(32, 48, dtype=torch.bfloat16) * 1e-4
    for by_rows in (True, False):
        narrow = cast(x, scale_for(x, dtype, by_rows), dtype)
        assert narrow.float().abs().max() == torch.finfo(dtype).max


@pytest.mark.parametrize(("dtype", "bound"), [(E4M3, 2.0**-4), (E5M2, 2.0**-3)])
def test_numbers_keep_their_first_digits(dtype: torch.dtype, bound: float) -> None:
    x = torch.rand(32, 48) + 0.5
    scale = scale_for(x, dtype)
    assert ((cast(x, scale, dtype).float() / scale / x - 1).abs() <= bound * 1.0001).all()


def test_both_ways_round_are_the_same_numbers() -> None:
    x = torch.randn(32, 48)
    scale = scale_for(x, E4M3)
    rows, columns = cast_both(x, scale, E4M3)
    assert columns.is_contiguous()
    assert torch.equal(rows.float(), columns.float().t())
    assert torch.equal(rows.float(), cast(x, scale, E4M3).float())
    assert torch.equal(columns.float(), cast_transposed(x, scale, E4M3).float())


def test_zeros_stay_zeros_and_what_is_not_finite_is_told() -> None:
    zeros = torch.zeros(16, 16)
    assert not cast(zeros, scale_for(zeros, E4M3), E4M3).float().any()
    for bad in (float("nan"), float("inf")):
        x = torch.ones(16, 16)
        x[3, 4] = bad
        assert cast(x, scale_for(x, E4M3), E4M3).float().isnan().any()


def test_a_product_of_numbers_that_fit_is_exact() -> None:
    a, b = (torch.randint(-8, 9, (size, 32)).double() for size in (16, 48))
    one = torch.ones(())
    narrow = product(cast(a, one, E4M3), cast(b, one, E4M3), one, one, torch.float64)
    assert torch.equal(narrow, a @ b.t())


def test_a_product_is_near_that_of_the_tensors() -> None:
    a, b = torch.randn(64, 256), torch.randn(32, 256) * 0.02
    scales = scale_for(a, E4M3), scale_for(b, E4M3)
    got = product(cast(a, scales[0], E4M3), cast(b, scales[1], E4M3), *scales, torch.float32)
    exact = a.double() @ b.double().t()
    assert (got - exact).norm() / exact.norm() < 0.05
