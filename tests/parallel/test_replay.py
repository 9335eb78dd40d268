"""A recorded step: what it reads and writes has fixed addresses, and its results are those of a
plain one.

The recording itself needs a GPU; here `record` is a stand-in with the same contract: it computes
into the tensors that it made the first time (benchmarks/gpu/replay.py compares bits on a GPU)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overland.config.derived import resolve_degrees
from overland.config.schema import JobConfig
from overland.data.batch import Batch
from overland.models.registry import build_model, model_config
from overland.parallel import whole as replay
from overland.parallel.whole import PLAIN_STEPS, Replayed, Whole, can_replay


class Model(nn.Module):
    """Takes what a decoder takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(16))

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor, **_: Tensor | None) -> Tensor:
        return (self.weight[tokens_BS] * labels_BS).square().sum()


class Tape:
    """The stand-in: replays by computing again, into the tensors of the first time."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.recorded = self.replayed = 0

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.recorded += 1
        loss = work()
        places = [p.grad for p in self.parameters]

        def again() -> None:
            self.replayed += 1
            for parameter in self.parameters:
                parameter.grad = None
            loss.copy_(work())
            for parameter, place in zip(self.parameters, places, strict=True):
                assert parameter.grad is not None
                assert place is not None
                place.copy_(parameter.grad)

        return again, loss


def batches(number: int, rows: int = 4) -> list[Batch]:
    torch.manual_seed(1)
    pairs = [(torch.randint(16, (rows, 8)), torch.randint(5, (rows, 8))) for _ in range(number)]
    return [Batch({"tokens_BS": tokens, "labels_BS": labels}) for tokens, labels in pairs]


def take(model: Whole, batch: Batch, scale: float = 0.5) -> tuple[float, Tensor]:
    """A step's loss and gradient; the gradient is gone afterwards, as after an update."""
    loss = model.loss_and_gradients(batch, torch.tensor(scale)).item()
    (parameter,) = model.parts[0].parameters()
    assert parameter.grad is not None
    gradient = parameter.grad.clone()
    parameter.grad = None
    return loss, gradient


def both(monkeypatch: pytest.MonkeyPatch) -> tuple[Replayed, Whole, Tape]:
    model = Replayed(Model(), rows_per_pass=4)
    tape = Tape(model.parts[0])
    monkeypatch.setattr(replay, "record", tape.record)
    return model, Whole(Model(), rows_per_pass=4), tape


def test_replayed_steps_give_what_plain_ones_give(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, tape = both(monkeypatch)
    for number, batch in enumerate(batches(PLAIN_STEPS + 3), start=1):
        loss, gradient = take(model, batch, scale=1 / number)
        expected, its_gradient = take(plain, batch, scale=1 / number)
        assert loss == expected
        assert torch.equal(gradient, its_gradient)
    assert (tape.recorded, tape.replayed) == (1, 3)


def test_a_new_shape_or_parameters_that_moved_are_recorded_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, plain, tape = both(monkeypatch)
    for batch in batches(PLAIN_STEPS + 1):
        take(model, batch)
    assert tape.recorded == 1
    for part in (*model.parts, *plain.parts):
        part.weight.data = part.weight.data * 2  # type: ignore[operator, union-attr]
    for batch in batches(PLAIN_STEPS + 1):
        loss, gradient = take(model, batch)
        expected, its_gradient = take(plain, batch)
        assert loss == expected
        assert torch.equal(gradient, its_gradient)
    assert tape.recorded == 2
    for batch in batches(PLAIN_STEPS + 1, rows=3):
        take(model, batch)
    assert tape.recorded == 3


def test_masked_documents_and_several_passes_are_computed_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _, tape = both(monkeypatch)
    for batch in batches(PLAIN_STEPS + 2):
        take(model, batch.replace(documents_BS=batch["tokens_BS"]))
    for batch in batches(PLAIN_STEPS + 2, rows=8):
        take(model, batch)
    assert tape.recorded == 0


def test_a_recording_that_fails_is_told_once_and_steps_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, plain, _ = both(monkeypatch)

    def fail(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        work()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(replay, "record", fail)
    some = batches(PLAIN_STEPS + 3)
    for batch in some[:PLAIN_STEPS]:
        take(model, batch)
    with pytest.warns(UserWarning, match="could not be recorded") as told:
        results = [take(model, batch) for batch in some[PLAIN_STEPS:]]
    assert len(told) == 1
    for (loss, gradient), batch in zip(results, some[PLAIN_STEPS:], strict=True):
        expected, its_gradient = take(plain, batch)
        assert loss == expected
        assert torch.equal(gradient, its_gradient)


@pytest.mark.parametrize(
    ("device", "world", "model", "attention", "replays"),
    [
        ("cuda", 1, {}, "auto", True),
        ("cpu", 1, {}, "auto", False),
        ("cuda", 2, {}, "auto", False),
        ("cuda", 1, {}, "flex", False),
        ("cuda", 1, {"name": "mistral", "flavor": "7B-v0.1"}, "auto", False),
    ],
)
def test_only_what_is_known_to_replay_is_replayed(
    device: str, world: int, model: dict[str, Any], attention: str, replays: bool
) -> None:
    sections = {
        "model": {"attention": attention, **model},
        "compile": {"enable": True},
        "training": {"mixed_precision_param": "bfloat16"},
    }
    config = JobConfig.model_validate(sections)
    degrees = resolve_degrees(config.parallelism, world)
    mesh: Any = SimpleNamespace(degrees=degrees, device_type=device)
    with torch.device("meta"):
        decoder = build_model(model_config(config.model), "auto")
    assert can_replay(decoder, mesh, config) is replays
    assert not can_replay(Model(), mesh, config)  # a user's own: no one knows when it waits
    for off in ({"enable": False}, {"enable": True, "cuda_graphs": False}):
        plain = JobConfig.model_validate({**sections, "compile": off})
        assert not can_replay(decoder, mesh, plain)
