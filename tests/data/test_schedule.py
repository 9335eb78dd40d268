import numpy as np
import pytest

from overland.data.order import MAX_PERIOD, Mixture, shares_of
from overland.errors import DataError

ZYDA = [40, 44, 3, 2, 10, 1]


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_the_rounded_shares_after_every_turn(seed: int) -> None:
    draw = np.random.default_rng(seed)
    weights = ZYDA if seed == 0 else draw.integers(1, 200, draw.integers(1, 9)).tolist()
    schedule = Mixture(weights)
    shares = np.array(weights) / sum(weights)
    for turn in range(2 * schedule.period + 3):
        counts = schedule.before(turn)
        assert counts.sum() == turn
        assert (np.abs(counts - turn * shares) < 1 - 1e-9).all()


def test_turns_and_counts_agree() -> None:
    schedule = Mixture(ZYDA)
    turns = np.arange(1234)
    whose, places = schedule.whose(turns), schedule.places(turns)
    had = np.zeros(len(ZYDA), int)
    for turn in turns.tolist():
        assert (schedule.before(turn) == had).all()
        assert places[turn] == had[whose[turn]]
        had[whose[turn]] += 1


def test_until_says_when_a_source_has_its_turn() -> None:
    schedule = Mixture(ZYDA)
    turns = np.arange(1000)
    whose, places = schedule.whose(turns), schedule.places(turns)
    for turn in turns.tolist():
        assert schedule.until(int(whose[turn]), int(places[turn])) == turn


def test_weights_are_taken_exactly() -> None:
    assert shares_of(ZYDA) == tuple(ZYDA)
    assert shares_of([0.1, 0.2, 0.7]) == (1, 2, 7)
    assert shares_of([1, 0, 1]) == (1, 0, 1)


def test_weights_without_a_small_common_measure_are_rounded_and_none_is_lost() -> None:
    shares = shares_of([0.3333333, 1e-9, 0.1234567, 0.6])
    assert sum(shares) == MAX_PERIOD
    assert min(shares) == 1
    assert shares[0] / sum(shares) == pytest.approx(0.3333333 / 1.05679, abs=1e-5)


def test_a_source_without_weight_gets_no_turn() -> None:
    assert 1 not in Mixture([1, 0, 2]).whose(np.arange(30))


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1]])
def test_weights_that_make_no_sense_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match="weights must not be negative"):
        Mixture(weights)
