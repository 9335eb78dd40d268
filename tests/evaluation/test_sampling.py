"""Scores are those of transformers, and meaningless settings are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overland.apps.evaluation.sampling import BROKEN, Sampling, choose, gumbel, row_keys, scored
from overland.errors import ModelError

DRAW = torch.Generator().manual_seed(0)
LOGITS = torch.randn(6, 50, generator=DRAW) * 3
LOGITS[1, :20] = 2.0  # many alike
LOGITS[2, 7] = 40.0  # one alone
SEEN = torch.randint(0, 50, (6, 9), generator=DRAW)
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": 500},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.3, "top_p": 0.001},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 0.9, "min_p": 1.0},
    {"temperature": 0.8, "repetition_penalty": 1.3},
    {"temperature": 0.8, "repetition_penalty": 0.7},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.0, "repetition_penalty": 1.4},
]


def theirs(settings: dict[str, Any]) -> torch.Tensor:
    """By transformers' own processors, in the order in which its generate() has them."""
    from transformers.generation import logits_process as one

    steps: list[Any] = []
    if (penalty := settings.get("repetition_penalty")) is not None:
        steps.append(one.RepetitionPenaltyLogitsProcessor(penalty))
    if settings["temperature"]:
        steps.append(one.TemperatureLogitsWarper(settings["temperature"]))
        if k := settings.get("top_k"):
            steps.append(one.TopKLogitsWarper(k))
        if p := settings.get("top_p"):
            steps.append(one.TopPLogitsWarper(p))
        if p := settings.get("min_p"):
            steps.append(one.MinPLogitsWarper(p))
    scores = LOGITS.clone()
    for step in steps:
        scores = step(SEEN, scores)
    return scores


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_scores_equal_those_of_transformers(settings: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    seen_BV = torch.zeros(6, 50, dtype=torch.bool).scatter(1, SEEN, True)
    found, wanted = scored(LOGITS, Sampling(**settings), seen_BV), theirs(settings)
    assert torch.equal(found.isinf(), wanted.isinf())
    assert torch.allclose(found, wanted, rtol=1e-6, atol=0)


def test_draws_depend_on_seed_prompt_position_and_token_alone() -> None:
    device = torch.device("cpu")
    places_B = torch.tensor([4, 4, 9])
    three = gumbel(row_keys(1, [0, 1, 2], device), places_B, 100)
    assert torch.equal(three[2:], gumbel(row_keys(1, [2], device), places_B[2:], 100))
    assert torch.equal(three[:, :40], gumbel(row_keys(1, [0, 1, 2], device), places_B, 40))
    others = [
        gumbel(row_keys(2, [2], device), torch.tensor([9]), 100),
        gumbel(row_keys(1, [3], device), torch.tensor([9]), 100),
        gumbel(row_keys(1, [2], device), torch.tensor([8]), 100),
    ]
    for other in others:
        assert not (other == three[2]).any()


def test_gumbel_numbers_are_gumbel_distributed() -> None:
    found = gumbel(row_keys(0, [0], torch.device("cpu")), torch.tensor([3]), 400_000)
    assert found.isfinite().all()
    assert abs(float(found.mean()) - 0.5772) < 0.01
    assert abs(float(found.var()) - 1.6449) < 0.02
    for x in (-1.0, 0.0, 2.0, 5.0):
        below = float((found < x).float().mean())
        assert abs(below - float(torch.exp(-torch.exp(torch.tensor(-x))))) < 0.004


def test_rows_that_are_not_finite_are_marked_alone() -> None:
    logits = LOGITS.clone()
    logits[2], logits[3, 4], logits[5, 0] = -torch.inf, torch.nan, torch.inf
    logits[4, 7] = -torch.inf  # a token that is ruled out
    keys = row_keys(0, range(6), torch.device("cpu"))
    for how in (
        Sampling(),
        Sampling(repetition_penalty=1.3),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_k=3, top_p=0.9),
        Sampling(temperature=1.0, min_p=0.1),
    ):
        seen = torch.ones_like(logits, dtype=torch.bool)
        found = choose(logits, how, keys, torch.arange(6), seen).tolist()
        assert [token == BROKEN for token in found] == [False, False, True, True, False, True]
        assert found[4] != 7


def test_the_smallest_temperatures_take_the_likeliest_token() -> None:
    keys = row_keys(0, range(6), torch.device("cpu"))
    for temperature in (1e-45, 1e-38, 1e-7):
        found = choose(LOGITS, Sampling(temperature=temperature), keys, torch.arange(6))
        assert found.tolist() == LOGITS.argmax(dim=1).tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": float("inf")},
        {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 2.0},
        {"repetition_penalty": 0.0}, {"repetition_penalty": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ModelError, match=f"--{name.replace('_', '-')} .*: expected "):
        Sampling(**settings)
