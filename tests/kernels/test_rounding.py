"""Stochastic rounding to bfloat16."""

from __future__ import annotations

import pytest
import torch

from overland.kernels.bfloat16 import random_bits, round_stochastically

COUNT = torch.tensor(7.0)


@pytest.mark.parametrize("value", [1.0 + 2**-9, -3.0 - 2**-7 / 3, 1e-20, 255.9])
def test_a_number_becomes_its_neighbors_as_often_as_it_is_near_them(value: float) -> None:
    wide = torch.full((1 << 17,), value)
    for bits in (
        random_bits(wide.numel(), COUNT, 0) & 0xFFFF,
        random_bits(wide.numel(), COUNT, 0) >> 16,
    ):
        narrow = round_stochastically(wide, bits)
        both = narrow.double().unique()
        assert len(both) == 2
        assert both[0] < wide[0].double() < both[1]
        assert abs(float(narrow.double().mean() - wide[0].double())) < 0.01 * float(
            both[1] - both[0]
        )


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, float("inf"), -float("inf")])
def test_what_bfloat16_can_hold_stays(value: float) -> None:
    wide = torch.full((1000,), value)
    assert torch.equal(
        round_stochastically(wide, random_bits(1000, COUNT, 0) & 0xFFFF).float(), wide
    )


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1])  # a CPU's, a GPU's
def test_not_a_number_stays_one(bits: int) -> None:
    wide = torch.full((1000,), bits, dtype=torch.int32).view(torch.float32)
    assert round_stochastically(wide, random_bits(1000, COUNT, 0) & 0xFFFF).isnan().all()


def test_every_update_and_every_parameter_has_a_chance_of_its_own() -> None:
    ways = [random_bits(1 << 16, torch.tensor(c), n) for c in (1.0, 2.0) for n in (0, 1)]
    for i, one in enumerate(ways):
        for other in ways[:i]:
            low = ((one & 0xFFFF) - 32767.5) * ((other & 0xFFFF) - 32767.5)
            assert abs(float(low.mean())) < 0.02 * 65536**2 / 12  # not correlated
    assert torch.equal(random_bits(100, COUNT, 3), random_bits(100, COUNT, 3))


def test_bits_are_even() -> None:
    bits = random_bits(1 << 16, COUNT, 5)
    shares = [float(((bits >> bit) & 1).double().mean()) for bit in range(32)]
    assert all(abs(share - 0.5) < 0.01 for share in shares)
