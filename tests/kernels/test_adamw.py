"""The update of parameters in halves is the update of whole ones."""

from __future__ import annotations

import pytest
import torch

from overland.kernels import adamw
from overland.kernels.adamw import Hyperparameters, UpdateState, update
from overland.kernels.bfloat16 import join, split


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_split_update_equals_torch(decoupled: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(40, 30) * 0.02)
    narrow, rest = split(whole.detach().clone())
    zeros = torch.zeros_like(whole.detach())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = kind([whole], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    rates = Hyperparameters(1e-2, 0.9, 0.95, 1e-8, 0.1, decoupled)
    moments = zeros.clone(), zeros.clone()
    for count in range(1, 4):
        gradient = torch.randn(40, 30).to(dtype)
        whole.grad = gradient.float() / 4
        reference.step()
        state = UpdateState(narrow, rest, gradient, *moments)
        numbers = torch.tensor(float(count)), rates, torch.tensor(4.0)
        update([state], *numbers, skip=torch.tensor(0.0))
        before = join(narrow, rest)
        update([state], *numbers, skip=torch.tensor(1.0))
        assert torch.equal(join(narrow, rest), before)
    torch.testing.assert_close(join(narrow, rest), whole.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("in_halves", [True, False])
def test_narrow_moments_are_right_on_average(in_halves: bool) -> None:
    """An equal gradient for 4096 numbers, 300 times: rounded to nearest, the slow mean would stop
    early; by chance, each number is somewhere else, and their mean is where it should be."""
    torch.manual_seed(0)
    size, steps = 4096, 300
    rates = Hyperparameters(1e-3, 0.9, 0.999, 1e-8, 0.0, True)
    wide = torch.zeros(size) + 0.5
    parameter, rest = split(wide) if in_halves else (wide, None)
    moments = torch.zeros(2, size, dtype=torch.bfloat16)
    gradient = torch.full((size,), 0.3)
    for count in range(1, steps + 1):
        state = UpdateState(parameter, rest, gradient.clone(), moments[0], moments[1])
        update([state], torch.tensor(float(count)), rates, torch.tensor(1.0), torch.tensor(0.0))
    exact = 0.3 * (1 - 0.9**steps), 0.3**2 * (1 - 0.999**steps)
    means = [float(moment.float().mean()) for moment in moments]
    assert means == pytest.approx(exact, rel=2e-3)
    assert moments[0].unique().numel() > 1  # not all alike
    moved = (wide if rest is None else join(parameter, rest)).double() - 0.5
    assert float(moved.mean()) == pytest.approx(-1e-3 * steps, rel=2e-3)


def test_a_skipped_update_leaves_narrow_moments_as_they_are() -> None:
    torch.manual_seed(0)
    moments = torch.rand(2, 100).bfloat16()
    state = UpdateState(torch.rand(100), None, torch.rand(100), moments[0], moments[1])
    before = moments.clone()
    rates = Hyperparameters(1e-3, 0.9, 0.95, 1e-8, 0.0, True)
    update([state], torch.tensor(3.0), rates, torch.tensor(1.0), skip=torch.tensor(1.0))
    assert torch.equal(moments, before)


@pytest.mark.parametrize("in_halves", [True, False])
def test_pieces_have_the_bits_of_the_whole(
    in_halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = Hyperparameters(1e-2, 0.9, 0.95, 1e-8, 0.1, True)
    results = []
    for piece in (2**23, 1024):
        monkeypatch.setattr(adamw, "PIECE", piece)
        torch.manual_seed(0)
        wide, gradient = torch.randn(50, 60), torch.randn(60, 50).T
        parameter, rest = split(wide) if in_halves else (wide, None)
        moments = torch.rand(2, 50, 60).bfloat16()
        state = UpdateState(parameter, rest, gradient, moments[0], moments[1], number=7)
        update([state], torch.tensor(3.0), rates, torch.tensor(1.0), skip=torch.tensor(0.0))
        results.append([wide if rest is None else join(parameter, rest), moments])
    assert all(torch.equal(*both) for both in zip(*results, strict=True))
