"""The loss that leaves its gradient in place of the logits is PyTorch's cross-entropy."""

from __future__ import annotations

import pytest
import torch

from overland.kernels.gradients import cross_entropy_


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 5e-3)]
)
def test_losses_and_gradients_equal_those_of_torch(dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(9, 50, dtype=torch.float64) * 3).to(dtype)
    labels = torch.randint(0, 50, (9,))
    labels[2] = -100
    exact = logits.detach().double().clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    expected.sum().backward()
    losses = cross_entropy_(logits, labels, -100)
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    assert (losses - expected).abs().max() < 20 * bound
    assert (logits - exact.grad).abs().max() < bound
    assert logits[2].abs().max() == 0
