"""A float32 number that is split and joined is the same number."""

from __future__ import annotations

import torch

from overland.kernels.bfloat16 import join, split


def every_kind_of_number() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    ties = (torch.arange(-(2**15), 2**15).to(torch.int32) << 16) + (1 << 15)
    return torch.cat((bits, ties, torch.tensor([0, -1, 2**31 - 1, -(2**31)]).to(torch.int32)))


def test_halves_put_together_are_the_same_bits() -> None:
    bits = every_kind_of_number()
    wide = bits.view(torch.float32)
    narrow, rest = split(wide)
    assert narrow.dtype == torch.bfloat16
    is_number = ~wide.isnan()
    assert torch.equal(join(narrow, rest).view(torch.int32)[is_number], bits[is_number])


def test_not_a_number_stays_none_in_both_halves() -> None:
    wide = every_kind_of_number().view(torch.float32)
    wide = wide[wide.isnan()]
    assert len(wide) > 500
    narrow, rest = split(wide)
    assert narrow.isnan().all()
    assert join(narrow, rest).isnan().all()


def test_the_upper_half_is_the_nearest_bfloat16() -> None:
    wide = every_kind_of_number().view(torch.float32)
    wide = wide[wide.isfinite() & (wide.abs() < 1e38)]
    ours = (split(wide)[0].double() - wide).abs()
    theirs = (wide.bfloat16().double() - wide).abs()
    assert torch.equal(ours, theirs)


def test_what_is_written_into_the_upper_half_is_what_halves_put_together_are() -> None:
    """A callback may zero, fill or copy into a weight; the remainders know nothing of it."""
    rest = torch.arange(-(2**15), 2**15).to(torch.int16)
    smallest, largest = 2.0**-133, torch.finfo(torch.bfloat16).max
    for number in (0.0, 1.0, 0.1, 1e-30, smallest, largest):
        for written in (number, -number):
            narrow = torch.full(rest.shape, written, dtype=torch.bfloat16)
            off = (join(narrow, rest).double() - narrow.double()).abs()
            assert (off <= max(abs(written) * 2**-8, smallest / 2)).all(), written
