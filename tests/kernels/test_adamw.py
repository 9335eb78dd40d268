"""The update of split master weights is the update of whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from overland.kernels.bfloat16 import Places, join, split
from overland.optimizers import parameter_shard
from overland.optimizers.adamw import update_adamw
from overland.optimizers.elementwise import AdamW
from overland.optimizers.parameter_shard import ParameterShard, Step
from overland.optimizers.rule import Like


def shard(
    parameter: Tensor,
    rest: Tensor | None,
    gradient: Tensor,
    moments: Sequence[Tensor],
    decay: float = 0.0,
) -> ParameterShard:
    state = {"exp_avg": moments[0], "exp_avg_sq": moments[1]}
    kinds = dict.fromkeys(state, Like())
    return ParameterShard("w", parameter, rest, gradient, kinds, state, {}, 1.0, decay, seed=7)


def step(count: int, lr: float, divisor: float = 1.0, skip: float = 0.0) -> Step:
    return Step(lr, torch.tensor(float(count)), torch.tensor(divisor), torch.tensor(skip))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_split_update_equals_torch(decoupled: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(40, 30) * 0.02)
    narrow, rest = split(whole.detach().clone())
    zeros = torch.zeros_like(whole.detach())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = kind([whole], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    moments = zeros.clone(), zeros.clone()
    for count in range(1, 4):
        gradient = torch.randn(40, 30).to(dtype)
        whole.grad = gradient.float() / 4
        reference.step()
        ours = [shard(narrow, rest, gradient, moments, decay=0.1)]
        update_adamw(AdamW(decoupled=decoupled), ours, step(count, 1e-2, 4.0))
        before = join(narrow, rest)
        update_adamw(AdamW(decoupled=decoupled), ours, step(count, 1e-2, 4.0, skip=1.0))
        assert torch.equal(join(narrow, rest), before)
    torch.testing.assert_close(join(narrow, rest), whole.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("in_halves", [True, False])
def test_narrow_moments_are_right_on_average(in_halves: bool) -> None:
    """An equal gradient for 4096 numbers, 300 times: rounded to nearest, the slow mean would stop
    early; with stochastic rounding, each number differs, and their mean is where it should be."""
    torch.manual_seed(0)
    size, steps = 4096, 300
    rule = AdamW(beta2=0.999, bf16_moments=True)
    wide = torch.zeros(size) + 0.5
    parameter, rest = split(wide) if in_halves else (wide, None)
    moments = torch.zeros(2, size, dtype=torch.bfloat16)
    gradient = torch.full((size,), 0.3)
    for count in range(1, steps + 1):
        update_adamw(rule, [shard(parameter, rest, gradient.clone(), moments)], step(count, 1e-3))
    exact = 0.3 * (1 - 0.9**steps), 0.3**2 * (1 - 0.999**steps)
    means = [float(moment.float().mean()) for moment in moments]
    assert means == pytest.approx(exact, rel=2e-3)
    assert moments[0].unique().numel() > 1  # not all alike
    moved = (wide if rest is None else join(parameter, rest)).double() - 0.5
    assert float(moved.mean()) == pytest.approx(-1e-3 * steps, rel=2e-3)


def test_a_skipped_update_leaves_narrow_moments_as_they_are() -> None:
    torch.manual_seed(0)
    moments = torch.rand(2, 100).bfloat16()
    ours = [shard(torch.rand(100), None, torch.rand(100), moments)]
    before = moments.clone()
    update_adamw(AdamW(bf16_moments=True), ours, step(3, 1e-3, skip=1.0))
    assert torch.equal(moments, before)


@pytest.mark.parametrize("in_halves", [True, False])
def test_pieces_have_the_bits_of_the_whole(
    in_halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for piece in (2**23, 1024):
        monkeypatch.setattr(parameter_shard, "PIECE", piece)
        torch.manual_seed(0)
        wide, gradient = torch.randn(50, 60), torch.randn(60, 50).T
        parameter, rest = split(wide) if in_halves else (wide, None)
        moments = torch.rand(2, 50, 60).bfloat16()
        ours = [shard(parameter, rest, gradient, moments, decay=0.1)]
        update_adamw(AdamW(bf16_moments=True), ours, step(3, 1e-2))
        results.append([wide if rest is None else join(parameter, rest), moments])
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


@pytest.mark.parametrize(("rows", "columns"), [(3, 1), (1, 4), (3, 4)])
def test_narrow_moments_do_not_depend_on_how_a_parameter_is_sharded(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_shard, "PIECE", 1 << 6)  # a shard is updated in several pieces
    torch.manual_seed(0)
    numbers, gradient = torch.randn(12, 20), torch.randn(12, 20)

    def updated(height: int, width: int) -> tuple[Tensor, Tensor]:
        """Returns both moments after an update of parts of this size."""
        moments = torch.zeros(2, 12, 20, dtype=torch.bfloat16)
        for row in range(0, 12, height):
            for column in range(0, 20, width):
                part = slice(row, row + height), slice(column, column + width)
                state = [moment[part].contiguous() for moment in moments]
                one = shard(numbers[part].contiguous(), None, gradient[part].clone(), state)
                places = Places(row * 20 + column, width, 20)
                update_adamw(AdamW(bf16_moments=True), [replace(one, places=places)], step(3, 1e-3))
                for moment, new in zip(moments, state, strict=True):
                    moment[part] = new
        return moments[0], moments[1]

    whole, parts = updated(12, 20), updated(12 // rows, 20 // columns)
    assert all(map(torch.equal, whole, parts))
