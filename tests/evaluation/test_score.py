"""Scores of continuations: sharing what they begin with changes nothing but the time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overland.apps.evaluation.ranks import RankedModel
from overland.apps.evaluation.score import ContinuationScorer, Pair, TextScore, compare, plant
from overland.apps.proofs.pool import RankPool
from overland.errors import ModelError
from overland.models import DecoderConfig, build_model
from overland.models.decoder import Decoder
from overland.models.init import init_weights
from overland.world import World
from tests.models.tiny import hf

VOCABULARY = 96


def tiny(**changes: Any) -> Decoder:
    model = build_model(DecoderConfig.from_hf(hf("llama", **changes)))
    init_weights(model, seed=3)
    return model.eval()


def plainly(model: nn.Module, request: Pair, max_length: int) -> TextScore:
    """One sequence at a time."""
    context, continuation = request
    tokens = [*context, *continuation][-(max_length + 1) :]
    with torch.no_grad():
        log_probs_SV = model(torch.tensor([tokens[:-1]])).log_softmax(-1)[0]
    rows_NV = log_probs_SV[-len(continuation) :]
    wanted_N = torch.tensor(list(continuation))
    is_greedy = bool((rows_NV.argmax(-1) == wanted_N).all())
    return TextScore(float(rows_NV.gather(1, wanted_N[:, None]).double().sum()), is_greedy)


def here(model: nn.Module, **share: int) -> RankedModel:
    return RankedModel(model, torch.device("cpu"), **share)


def assert_plain(model: nn.Module, requests: list[Pair], **settings: Any) -> None:
    max_length = settings.setdefault("max_length", 64)
    found = scores(ContinuationScorer(here(model), **settings), requests)
    assert sorted(found) == list(range(len(requests)))
    for number, request in enumerate(requests):
        wanted = plainly(model, request, max_length)
        assert found[number].log_likelihood == pytest.approx(wanted.log_likelihood, abs=1e-5)
        assert found[number].is_greedy == wanted.is_greedy


def scores(scorer: ContinuationScorer, requests: Sequence[Pair]) -> dict[int, TextScore]:
    return {number: score for batch in scorer.score(requests) for number, score in batch}


def some(count: int, draw: random.Random) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def questions() -> list[Pair]:
    """Examples that all begin with, questions with answers of any length, and what is odd: one
    answer, the same twice, answers that begin others, contexts that begin others."""
    draw = random.Random(5)
    examples = some(12, draw)
    requests: list[Pair] = []
    for _ in range(6):
        question = examples + some(draw.randint(1, 9), draw)
        answers = [some(draw.randint(1, 6), draw) for _ in range(4)]
        answers += [answers[0][:1], answers[1] + [7], list(answers[2])]
        requests += [(question, answer) for answer in answers]
    requests += [([5], [6]), ([5], [6, 7, 8]), ([5, 6], [7, 8]), (some(20, draw), some(3, draw))]
    draw.shuffle(requests)
    return requests


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4, "head_dim": 16},
        {"sliding_window": 6, "model_type": "mistral"},
    ],
    ids=["llama", "heads", "window"],
)
def test_a_shared_beginning_changes_no_score(changes: dict[str, Any]) -> None:
    model = build_model(DecoderConfig.from_hf({**hf("llama"), **changes}))
    init_weights(model, seed=3)
    assert_plain(model.eval(), questions())
    assert_plain(model, questions(), batch_size=1)


def test_greedy_continuations_are_told() -> None:
    model = tiny()
    prompt = [3, 1, 4]
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(5):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    answer = tokens[3:]
    other = [*answer[:-1], (answer[-1] + 1) % VOCABULARY]
    requests: list[Pair] = [(prompt, answer), (prompt, other), (prompt, answer[:2])]
    found = scores(ContinuationScorer(here(model), max_length=64), requests)
    assert [found[i].is_greedy for i in range(3)] == [True, False, True]


def test_what_is_shared_is_computed_once() -> None:
    context = list(range(40))
    requests: list[Pair] = [(context, [50 + i, 60, 61]) for i in range(4)]
    rows = list(plant(requests, 64, longest_tree=1024))
    assert [len(row) for row in rows] == [40 + 4 * 2]
    one_token: list[Pair] = [(context, [50 + i]) for i in range(4)]
    (row,) = plant(one_token, 64, longest_tree=1024)
    assert len(row) == 40
    assert row.is_chain


def test_a_long_context_is_cut_at_the_left() -> None:
    draw = random.Random(1)
    requests: list[Pair] = [(some(30, draw), some(n, draw)) for n in (1, 5, 16)]
    assert_plain(tiny(), requests, max_length=16)


def test_rotary_angles_that_stretch_with_a_row_stay_those_of_the_sequence() -> None:
    draw = random.Random(2)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny(rope_parameters=rope)  # trained on 64
    context = some(50, draw)
    requests: list[Pair] = [(context, some(12, draw)) for _ in range(6)]
    assert_plain(model, requests)
    requests += [(some(80, draw), some(n, draw)) for n in (3, 9)]
    assert_plain(model, requests, max_length=128)


class Foreign(nn.Module):
    """A causal model that knows nothing of trees: a running mean of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Embedding(VOCABULARY, 8)
        self.outside = nn.Linear(8, VOCABULARY)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.inside(tokens_BS).cumsum(1)
        counts_S = torch.arange(1, tokens_BS.shape[1] + 1)
        logits_BSV: Tensor = self.outside(x_BSD / counts_S[None, :, None])
        return logits_BSV


def test_a_model_of_somebody_else_is_scored_row_by_row() -> None:
    assert_plain(Foreign(), questions())


def test_parts_are_disjoint_and_together_everything() -> None:
    model, requests = tiny(), questions()
    parts = [
        scores(ContinuationScorer(here(model, part=part, num_parts=3), max_length=64), requests)
        for part in range(3)
    ]
    assert sum(map(len, parts)) == len(requests)
    whole = scores(ContinuationScorer(here(model), max_length=64), requests)
    joined = {number: score for part in parts for number, score in part.items()}
    assert joined.keys() == whole.keys()
    for number, score in whole.items():
        assert joined[number].log_likelihood == pytest.approx(score.log_likelihood, abs=1e-5)


class Narrow(ContinuationScorer):
    """A device whose memory holds two rows."""

    def _score_rows(self, rows: list[Any]) -> list[tuple[int, TextScore]]:
        if len(rows) > 2:
            raise torch.OutOfMemoryError
        return super()._score_rows(rows)


def test_a_batch_that_does_not_fit_is_halved() -> None:
    model, requests = tiny(), questions()
    found = scores(Narrow(here(model), max_length=64, batch_size=32), requests)
    assert found.keys() == scores(ContinuationScorer(here(model), max_length=64), requests).keys()


def test_a_broken_model_has_no_scores() -> None:
    broken = tiny()
    assert broken.lm_head is not None
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="not finite"):
        list(ContinuationScorer(here(broken), max_length=4).score([([1], [2])]))


def test_nothing_to_score_is_no_error() -> None:
    assert list(ContinuationScorer(here(tiny()), max_length=4).score([])) == []


def compared(world: World, logits_NV: Tensor, wanted_N: Tensor) -> Tensor:
    part = logits_NV.chunk(world.size, dim=1)[world.rank]
    return compare(part, wanted_N, torch.distributed.group.WORLD)


def test_the_lowest_of_equally_likely_tokens_wins_on_any_number_of_ranks(ranks: RankPool) -> None:
    logits_NV = torch.tensor([[0.0, 3.0, 3.0, 0.0], [1.0, 0.0, 0.0, 1.0]]).repeat(2, 1)
    wanted_N = torch.tensor([1, 0, 2, 3])
    expected = compare(logits_NV, wanted_N)
    assert expected[1].tolist() == [1, 1, 0, 0]
    for found in ranks.run(2, compared, logits_NV, wanted_N):
        torch.testing.assert_close(found, expected)
