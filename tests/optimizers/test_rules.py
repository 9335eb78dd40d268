"""Every optimizer gets from the framework what the fused AdamW has: clipping, the skipped step,
split master weights, groups, pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from overland.config import schema
from overland.errors import OptimizerError
from overland.optimizers import Elementwise, Like, Packed, Rates, WholeMatrix, registry
from overland.optimizers import parameter_shard as shard
from overland.optimizers.optimizer import Optimizer
from overland.optimizers.registry import rules_of
from tests.optimizers.own import pack, unpack

NAMES = ["AdamW", "Adam", "Lion", "Muon", "EightBit"]
ONE, ZERO = torch.ones(()), torch.zeros(())


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.Linear(20, 7)).to(dtype)


def give_gradients(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    """The same for every number format of the parameters."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape).bfloat16() * scale
        parameter.grad = gradient.to(parameter.dtype)


def settings(name: str, **more: object) -> schema.Optimizer:
    return schema.Optimizer.model_validate({"name": name, "lr": 1e-2, **more})


def train(model: nn.Module, optimizer: Optimizer, steps: int = 3, scale: float = 1.0) -> None:
    for number in range(steps):
        give_gradients(model, number, scale)
        optimizer.update(1e-2, ONE, 0.0, scale * ONE, skip=ZERO)


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    with optimizer.whole():
        tensors = {**dict(model.named_parameters()), **optimizer.tensors()}
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_skipped_step_leaves_everything_as_it_was(name: str, is_split: bool) -> None:
    model = network()
    optimizer = Optimizer([model], settings(name))
    if is_split:
        optimizer.split()
    train(model, optimizer)
    before = everything(model, optimizer)
    give_gradients(model, 9, scale=float("nan"))
    optimizer.update(1e-2, torch.tensor(float("nan")), 1.0, ONE, skip=ONE)
    assert_same(everything(model, optimizer), before)


@pytest.mark.parametrize("name", NAMES)
def test_split_master_weights_move_as_whole_ones_do(name: str) -> None:
    whole, halves = network(), network()
    one, two = Optimizer([whole], settings(name)), Optimizer([halves], settings(name))
    two.split()
    train(whole, one)
    train(halves, two)
    assert_same(everything(whole, one), everything(halves, two))


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_scale_is_divided_out(name: str) -> None:
    plain, scaled = network(), network()
    one, two = Optimizer([plain], settings(name)), Optimizer([scaled], settings(name))
    train(plain, one)
    train(scaled, two, scale=8.0)
    assert_same(everything(plain, one), everything(scaled, two))


@pytest.mark.parametrize("name", ["Lion", "EightBit"])
def test_pieces_give_the_bits_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for piece in (2**23, 64):
        monkeypatch.setattr(shard, "PIECE", piece)
        model = network()
        options = {"options": {"bf16_moments": True}} if name == "Lion" else {}
        optimizer = Optimizer([model], settings(name, **options))
        train(model, optimizer)
        results.append(everything(model, optimizer))
    assert_same(*results)


def test_lion_is_the_one_of_the_paper() -> None:
    """Algorithm 2 of Chen et al. 2023, one number at a time."""
    model = nn.Linear(3, 2, bias=False).double()
    start = model.weight.detach().clone()
    optimizer = Optimizer([model], settings("Lion", weight_decay=0.5))
    expected, average = start.flatten().tolist(), [0.0] * 6
    for number in range(3):
        torch.manual_seed(number)
        model.weight.grad = torch.randn(2, 3).double()
        for i, gradient in enumerate(model.weight.grad.flatten().tolist()):
            direction = 0.9 * average[i] + 0.1 * gradient
            sign = (direction > 0) - (direction < 0)
            expected[i] -= 1e-2 * (sign + 0.5 * expected[i])
            average[i] = 0.99 * average[i] + 0.01 * gradient
        optimizer.update(1e-2, ONE, 0.0, ONE, skip=ZERO)
    assert model.weight.flatten().tolist() == pytest.approx(expected, rel=1e-12)


def test_bf16_state_is_right_on_average() -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = Optimizer([model], settings("Lion", options={"bf16_moments": True}))
    for _ in range(300):
        model.weight.grad = torch.full((64, 64), 0.3)
        optimizer.update(1e-4, ONE, 0.0, ONE, skip=ZERO)
    average = optimizer.state(model.weight)["exp_avg"]
    assert average.dtype == torch.bfloat16
    assert float(average.float().mean()) == pytest.approx(0.3 * (1 - 0.99**300), rel=2e-3)


@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_the_first_matching_group_sets_the_rates(name: str) -> None:
    groups = [
        {"pattern": "0.*", "lr_factor": 0.0},
        {"pattern": "2.bias", "weight_decay": 2.0},
        {"pattern": "*", "lr_factor": 0.5},
    ]
    grouped, plain = network(), network()
    start = [p.detach().clone() for p in plain.parameters()]
    train(grouped, Optimizer([grouped], settings(name, groups=groups)), steps=1)
    train(plain, Optimizer([plain], settings(name)), steps=1)
    moved = [p - a for p, a in zip(grouped.parameters(), start, strict=True)]
    usual = [p - a for p, a in zip(plain.parameters(), start, strict=True)]
    assert not moved[0].any()
    assert not moved[1].any()
    torch.testing.assert_close(moved[2], usual[2] / 2, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(moved[4], usual[4] / 2, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(moved[5], usual[5] - 1e-2 * 2 * start[5], rtol=1e-4, atol=1e-6)


def test_a_whole_matrix_rule_leaves_the_rest_to_adamw() -> None:
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(5, 4), "linear": nn.Linear(4, 4)})
    optimizer = Optimizer([model], settings("Muon"))
    states = {name: [*optimizer.state(p)] for name, p in model.named_parameters()}
    adamw = ["exp_avg", "exp_avg_sq"]
    assert states == {
        "embed_tokens.weight": adamw,
        "linear.weight": ["momentum"],
        "linear.bias": adamw,
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"name": "Lino"}, "there is no optimizer 'Lino'; did you mean 'Lion'?"),
        ({"name": "SGD"}, "there is no optimizer 'SGD'; valid names: Adam, AdamW, "),
        ({"name": "Lion", "options": {"beta_2": 0.9}}, "no option 'beta_2'; did you mean 'beta2'?"),
        ({"name": "Lion", "options": {"beta2": "high"}}, 'Lion\'s option beta2 = "high": '),
        ({"name": "AdamW", "options": {"beta2": 0.9}}, "takes its options from [optimizer] itself"),
        ({"name": "Lion", "options": {"beta2": float("nan")}}, "option beta2 is not a number"),
    ],
)
def test_what_is_wrong_is_one_sentence(words: dict[str, object], says: str) -> None:
    with pytest.raises(OptimizerError) as error:
        rules_of(settings(**words))  # type: ignore[arg-type]
    assert says in str(error.value)


def momentum_in_place(self: object, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor],
                      rates: Rates) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    state["momentum"].mul_(0.9).add_(gradient)
    return parameter - rates.lr * state["momentum"], state


def sgd(self: object, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor],
        rates: Rates) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    return parameter - rates.lr * gradient, state


def keep(kind: object) -> Callable[..., object]:
    return lambda self, name, shape: {"momentum": kind}


@pytest.mark.parametrize(
    ("base", "members", "says"),
    [
        (
            Elementwise,
            {"update": momentum_in_place, "state": keep(Like())},
            "Own.update() changes one of its arguments in place",
        ),
        (
            Elementwise,
            {"update": lambda self, p, g, s, r: ((p - g).sum().view(1), s)},
            "the update of 0.weight returned (1,) as its new parameter",
        ),
        (Elementwise, {"update": lambda self, p, g, s, r: p - g}, "must return a tensor and"),
        (
            Elementwise,
            {
                "update": lambda self, p, g, s, r: (p - g, {"momentum": g[:1]}),
                "state": keep(Like()),
            },
            "returned (1,) as its new momentum",
        ),
        (
            WholeMatrix,
            {"whole": lambda self, m: m.T, "after": lambda self, p, d, s, r: (p - d, s)},
            "Own.whole() was given (20, 12) and returned (12, 20)",
        ),
        (
            Elementwise,
            {"update": sgd, "state": keep(Like("bf16"))},
            "the dtype 'bf16' is not one of",
        ),
        (Elementwise, {"update": sgd, "state": keep(Like)}, "is not one of Like(), Scalar()"),
        (
            Elementwise,
            {"update": sgd, "state": keep(Packed(pack, unpack, 100, 1.0))},
            "a block of 100 elements is not a power of two",
        ),
        (
            Elementwise,
            {"update": sgd, "takes": lambda self, name, shape: len(shape) > 1},
            "Own does not take 0.bias, and neither does any other",
        ),
    ],
)
def test_a_rule_that_cannot_work_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, base: type, members: dict[str, object], says: str
) -> None:
    """What is stretched to fit, or written in place, would go unnoticed until it is too late."""
    rule = dataclass(frozen=True)(type("Own", (base,), members))
    monkeypatch.setitem(registry._RULES, "Own", rule)
    model = network()
    with pytest.raises(OptimizerError) as error:
        train(model, Optimizer([model], settings("Own")), steps=1)
    assert says in str(error.value)
