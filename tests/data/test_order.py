import numpy as np
import pytest

from overland.data.order import MOST_CALLS, Counts, permute
from overland.errors import DataError


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 65_537])
def test_a_permutation_holds_every_index_once(size: int) -> None:
    assert sorted(permute(np.arange(size), size, "key")) == list(range(size))


def test_another_key_gives_another_order() -> None:
    first, again, other = (permute(np.arange(1000), 1000, "k", seed) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).mean() > 0.98


def test_one_index_is_placed_as_it_is_among_all() -> None:
    together = permute(np.arange(500), 500, "k")
    assert [int(permute([i], 500, "k")[0]) for i in range(500)] == list(together)


def test_neighbors_end_up_far_apart() -> None:
    places = permute(np.arange(100_000), 100_000, "k")
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(places, np.arange(100_000))[0, 1]) < 0.02


def test_an_index_outside_is_refused() -> None:
    with pytest.raises(IndexError):
        permute([5], 5, "k")


@pytest.mark.parametrize("at_once", [1, 64])
def test_an_item_that_would_take_hours_to_count_is_refused_at_once(at_once: int) -> None:
    counts = Counts(per_epoch=1)
    for number in (1, at_once):  # all shards are known after the first epoch
        assert counts.find([10**12]) is None
        counts.add([10] * number)
    with pytest.raises(DataError, match="about 100,000,000,000 epochs into the data"):
        counts.find([10**12])
    far = 10 * MOST_CALLS * at_once
    while (found := counts.find([far])) is None:
        counts.add([10] * at_once)
    (window,), (place,) = found
    assert (window, place) == (far // 10, 0)
