import pytest
import torch
from torch import nn

from overland.config import schema
from overland.optimizers.optimizer import Optimizer

ONE, ZERO = torch.ones(()), torch.zeros(())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8)).double()


def take_gradients(network: nn.Module, scale: float = 1.0) -> None:
    loss = network(torch.arange(10)).square().sum() * scale
    loss.backward()


def gradient_norm(network: nn.Module) -> torch.Tensor:
    return nn.utils.get_total_norm([p.grad for p in network.parameters()])


def test_frozen_parameters_are_left_out() -> None:
    network = model()
    network[0].requires_grad_(False)
    assert len(Optimizer([network], schema.Optimizer()).parameters) == 4


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e9])
def test_a_clipped_update_is_the_one_of_plain_torch(max_norm: float) -> None:
    settings = schema.Optimizer(lr=1e-2, weight_decay=0.1)
    ours, plain = model(), model()
    optimizer = Optimizer([ours], settings)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False,
    )  # fmt: skip
    for _ in range(3):
        take_gradients(ours, scale=8.0)
        norm = gradient_norm(ours) / 8.0
        optimizer.update(1e-2, norm, max_norm, 8.0 * ONE, skip=ZERO)
        take_gradients(plain)
        if max_norm:  # torch's own function adds 1e-6 to the norm
            factor = (max_norm / gradient_norm(plain)).clamp(max=1.0)
            for parameter in plain.parameters():
                parameter.grad *= factor
        reference.step()
        reference.zero_grad()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)  # float64 to its last digits


def test_a_skipped_update_changes_nothing_not_even_the_step_count() -> None:
    network = model()
    optimizer = Optimizer([network], schema.Optimizer(lr=1e-2))
    take_gradients(network)
    optimizer.update(1e-2, gradient_norm(network), 1.0, ONE, skip=ZERO)
    before = [p.detach().clone() for p in network.parameters()]
    take_gradients(network, scale=float("nan"))
    optimizer.update(1e-2, gradient_norm(network), 1.0, ONE, skip=ONE)
    for old, new in zip(before, network.parameters(), strict=True):
        assert torch.equal(old, new)
    assert optimizer.num_updates.item() == 1
