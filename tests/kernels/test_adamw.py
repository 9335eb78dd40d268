"""The update of parameters in halves is the update of whole ones."""

from __future__ import annotations

import pytest
import torch

from overland.kernels.adamw import Rates, SplitState, update_split
from overland.kernels.split import join, split


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_split_update_equals_torch(decoupled: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(40, 30) * 0.02)
    narrow, rest = split(whole.detach().clone())
    zeros = torch.zeros_like(whole.detach())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = kind([whole], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    rates = Rates(1e-2, 0.9, 0.95, 1e-8, 0.1, decoupled)
    moments = zeros.clone(), zeros.clone()
    for count in range(1, 4):
        gradient = torch.randn(40, 30).to(dtype)
        whole.grad = gradient.float() / 4
        reference.step()
        state = SplitState(narrow, rest, gradient, *moments)
        numbers = torch.tensor(float(count)), rates, torch.tensor(4.0)
        update_split([state], *numbers, skip=torch.tensor(0.0))
        before = join(narrow, rest)
        update_split([state], *numbers, skip=torch.tensor(1.0))
        assert torch.equal(join(narrow, rest), before)
    torch.testing.assert_close(join(narrow, rest), whole.detach(), rtol=1e-6, atol=1e-8)
