"""The chunked loss is the plain one, in every type."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from overland.models.loss import IGNORED, OutputMatrix, WeightedSum


def chunked_cross_entropy(
    hidden_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor, chunk_tokens: int | None = None
) -> Tensor:
    if chunk_tokens is None:
        return OutputMatrix(weight_VD).weighted_sum(hidden_BSD, labels_BS)[0]
    hidden_ND, labels_N = hidden_BSD.flatten(0, -2), labels_BS.reshape(-1)
    total: Tensor = WeightedSum.apply(hidden_ND, weight_VD, labels_N, None, 0.0, chunk_tokens)[0]
    return total


def plain_cross_entropy(hidden_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor) -> Tensor:
    """The reference, which holds all logits."""
    logits_NV = (hidden_BSD @ weight_VD.t()).flatten(0, -2)
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    labels_N = labels_BS.reshape(-1)
    return F.cross_entropy(logits_NV.to(wide), labels_N, ignore_index=IGNORED, reduction="sum")


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


def head_and_labels(tokens: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden_BSD = torch.randn(2, tokens, 8, dtype=torch.float64, generator=generator)
    weight_VD = torch.randn(11, 8, dtype=torch.float64, generator=generator)
    labels_BS = torch.randint(0, 11, (2, tokens), generator=generator)
    labels_BS[0, :5] = -100
    return hidden_BSD.requires_grad_(), weight_VD.requires_grad_(), labels_BS


def test_z_loss_and_weights_are_what_they_say() -> None:
    hidden_BSD, weight_VD, labels_BS = head_and_labels()
    weights_BS = torch.linspace(0, 2, labels_BS.numel(), dtype=torch.float64).view_as(labels_BS)
    total, z_part = OutputMatrix(weight_VD).weighted_sum(hidden_BSD, labels_BS, weights_BS, 1e-2)
    logits_BSV = hidden_BSD @ weight_VD.t()
    valid_BS = labels_BS != -100
    log_z_BS = logits_BSV.logsumexp(-1)
    chosen_BS = logits_BSV.gather(-1, labels_BS.clamp(min=0)[..., None])[..., 0]
    z_BS = 1e-2 * log_z_BS.square() * valid_BS * weights_BS
    expected = ((log_z_BS - chosen_BS) * valid_BS * weights_BS + z_BS).sum()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(z_part, z_BS.sum())
    ours = torch.autograd.grad(total, (hidden_BSD, weight_VD))
    theirs = torch.autograd.grad(expected, (hidden_BSD, weight_VD))
    torch.testing.assert_close(ours, theirs)


def test_token_losses_can_enter_any_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overland.models.loss.CHUNK_TOKENS", 16)  # several chunks
    hidden_BSD, weight_VD, labels_BS = head_and_labels()
    losses_BS = OutputMatrix(weight_VD).token_losses(hidden_BSD, labels_BS)
    logits_NV = (hidden_BSD @ weight_VD.t()).flatten(0, 1)
    plain_BS = F.cross_entropy(logits_NV, labels_BS.flatten(), reduction="none").view_as(losses_BS)
    torch.testing.assert_close(losses_BS, plain_BS)
    ours, theirs = (
        torch.autograd.grad(one.sum(dim=1).mul(0.1).tanh().prod(), (hidden_BSD, weight_VD))
        for one in (losses_BS, plain_BS)
    )
    torch.testing.assert_close(ours, theirs)
