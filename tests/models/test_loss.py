"""The chunked loss is the plain one, in every type."""

from __future__ import annotations

import pytest
import torch

from overland.models.loss import chunked_cross_entropy, plain_cross_entropy


def run(loss, dtype: torch.dtype, scale: float = 1.0, **options: int):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    hidden = torch.randn(3, 11, 16, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, 50, (3, 11))
    labels[:, 3:5] = -100
    value = loss(hidden, weight, labels, **options)
    (value * scale).backward()
    return value.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk_tokens", [1, 7, 33, 2048])
def test_chunked_loss_and_gradients_equal_plain_in_float64(chunk_tokens: int) -> None:
    plain = run(plain_cross_entropy, torch.float64, scale=1 / 27)
    chunked = run(chunked_cross_entropy, torch.float64, scale=1 / 27, chunk_tokens=chunk_tokens)
    assert chunked[0].dtype == torch.float64
    for ours, theirs in zip(chunked, plain, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12


def test_loss_of_bfloat16_is_summed_in_float32() -> None:
    exact = run(plain_cross_entropy, torch.float64, scale=1 / 27)
    value, grad_hidden, grad_weight = run(
        chunked_cross_entropy, torch.bfloat16, scale=1 / 27, chunk_tokens=7
    )
    assert value.dtype == torch.float32
    assert grad_hidden.dtype == grad_weight.dtype == torch.bfloat16
    assert abs(value - exact[0]) / exact[0] < 1e-2
    torch.testing.assert_close(grad_hidden.double(), exact[1], atol=5e-3, rtol=5e-2)
    torch.testing.assert_close(grad_weight.double(), exact[2], atol=5e-3, rtol=5e-2)


def test_only_ignored_labels_give_zero() -> None:
    hidden = torch.randn(1, 4, 8, requires_grad=True)
    weight = torch.randn(20, 8, requires_grad=True)
    value = chunked_cross_entropy(hidden, weight, torch.full((1, 4), -100))
    value.backward()
    assert value == 0
    assert hidden.grad.abs().max() == 0
    assert weight.grad.abs().max() == 0


def test_a_frozen_output_matrix_gets_no_gradient() -> None:
    hidden = torch.randn(1, 4, 8, requires_grad=True)
    weight = torch.randn(20, 8)
    chunked_cross_entropy(hidden, weight, torch.zeros(1, 4, dtype=torch.long)).backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert chunked_cross_entropy(hidden, weight, torch.zeros(1, 4, dtype=torch.long)) > 0
