"""What a user's own objective gets wrong is one sentence, and never another number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from overland.config.schema import JobConfig
from overland.data.batch import Batch
from overland.errors import ObjectiveError
from overland.models.loss import OutputMatrix
from overland.objectives import registry
from overland.objectives.objective import Objective, count_of

ROWS, TOKENS, WIDTH, VOCABULARY = 4, 3, 5, 7

OWN = JobConfig.model_validate({"training": {"objective": "own"}})


def given(**more: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"labels_BS": torch.randint(VOCABULARY, (ROWS, TOKENS)), **more}


def sums(objective: Objective, fields: Mapping[str, Tensor]) -> Tensor:
    torch.manual_seed(1)
    weight_VD = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, requires_grad=True)
    hidden_BSD = torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    return objective.sums(OutputMatrix(weight_VD), hidden_BSD, fields)


def made(**members: Any) -> Objective:
    return type("Own", (Objective,), members)()


def test_a_loss_is_a_number_per_sample() -> None:
    """A mean over a pass would depend on how the batch is split into passes."""
    with pytest.raises(ObjectiveError, match=r"Own returned \(\) from loss\(\); expected a ten"):
        sums(made(loss=lambda self, terms, fields: (terms[:, 0].mean(), {})), given())
    with pytest.raises(ObjectiveError, match=r"Own returned \(4,\) from terms\(\)"):
        sums(made(terms=lambda self, losses, fields: losses.sum(1)), given())
    top = made(metrics=("top",), loss=lambda self, t, fields: (t[:, 0], {"top": t.max()}))
    with pytest.raises(ObjectiveError, match=r"\(\) from loss\(\) as its metric top"):
        sums(top, given())


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"loss": lambda self, t, fields: t[:, 0]}, "must return two things"),
        ({"loss": lambda self, t, fields: (t[:, 0].detach(), {})}, "has no gradient"),
        ({"metrics": ("top",)}, "metrics lists 'top', but loss"),
        (
            {"loss": lambda self, t, fields: (t[:, 0] * fields["score"], {})},
            "needs the field sc",
        ),
    ],
)
def test_what_loss_returns_and_asks_for(members: dict[str, Any], says: str) -> None:
    with pytest.raises(ObjectiveError, match=says):
        sums(made(**members), given())


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"metrics": ("loss",)}, "cannot log a metric as 'loss'"),
        ({"metrics": ("validation_loss/mine",)}, "cannot log a metric as 'validation_loss/mine'"),
        ({"metrics": ("a", "a")}, "a tuple of different names"),
        ({"metrics": "accuracy"}, "a tuple of different names"),
        ({"passes": ("labels_BS",)}, "like a field of the data"),
        ({"rows_per_sample": 0}, "a whole number of at least 1"),
        ({"counts": "rows"}, "must count tokens or samples"),
    ],
)
def test_what_an_objective_says_of_itself(
    monkeypatch: pytest.MonkeyPatch, members: dict[str, Any], says: str
) -> None:
    monkeypatch.setitem(registry._OBJECTIVES, "own", lambda: made(**members))
    with pytest.raises(ObjectiveError, match=says):
        registry.objective_for(OWN, None)


def test_an_objective_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Objective:
        raise ValueError("beta must be positive")

    monkeypatch.setitem(registry._OBJECTIVES, "own", refuse)
    with pytest.raises(ObjectiveError, match="cannot be created: beta must be positive"):
        registry.objective_for(OWN, None)
    monkeypatch.setitem(registry._OBJECTIVES, "own", lambda: None)  # type: ignore[arg-type]
    with pytest.raises(ObjectiveError, match="must extend Objective"):
        registry.objective_for(OWN, None)


def test_a_count_is_one_number() -> None:
    batch = Batch(given())
    for count in (lambda self, batch: 4, lambda self, batch: batch["labels_BS"].sum(1)):
        with pytest.raises(ObjectiveError, match=r"Own.count\(\) returned"):
            count_of(made(count=count), batch)
    with pytest.raises(ObjectiveError, match=r"count\(\) needs the field score"):
        count_of(made(count=lambda self, batch: batch["score"].sum()), batch)


def test_an_init_of_ones_own_need_not_call_the_first() -> None:
    class Own(Objective):
        def __init__(self) -> None:
            self.beta = 1.0

    assert sums(Own(), given())[0] == sums(Objective(), given())[0]


def test_weights_of_tokens_count() -> None:
    weights_BS = torch.tensor([[0.0, 0.5, 1.0]]).expand(ROWS, TOKENS)
    found = sums(Objective(), given(weights_BS=weights_BS))[0]
    kept = [sums(Objective(), {"labels_BS": only(place)})[0] for place in range(TOKENS)]
    torch.testing.assert_close(found, 0.5 * kept[1] + kept[2])
    batch = Batch(given(weights_BS=weights_BS))
    assert count_of(made(counts="tokens"), batch) == 1.5 * ROWS


def only(place: int) -> Tensor:
    labels_BS = torch.full((ROWS, TOKENS), -100)
    labels_BS[:, place] = given()["labels_BS"][:, place]
    return labels_BS


def test_half_a_pair_does_not_count() -> None:
    pairs = made(rows_per_sample=2)
    fields = given(weight_B=torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert count_of(pairs, Batch(fields)) == 1
    labels_BS = fields["labels_BS"].clone()
    labels_BS[2:] = -100
    torch.testing.assert_close(sums(pairs, fields)[0], sums(pairs, {"labels_BS": labels_BS})[0])
