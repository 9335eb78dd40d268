from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike

from overland.data.order import RECORD, Counts
from overland.errors import DataError

SIZES = [3, 0, 5, 1, 0, 0, 2] * 20


def find(counts: Counts, numbers: ArrayLike, at_once: int = 1) -> tuple[list[int], list[int]]:
    """Finds items, and counts the windows that they need, some at once."""
    while (found := counts.find(numbers)) is None:
        counts.add(SIZES[counts.num_known : counts.num_known + at_once])
    windows, places = found
    return windows.tolist(), places.tolist()


@pytest.mark.parametrize("at_once", [1, 4])
def test_items_are_found_in_their_windows(at_once: int) -> None:
    counts = Counts(per_epoch=7)
    expected = [(window, place) for window, size in enumerate(SIZES) for place in range(size)]
    numbers = np.random.default_rng(0).permutation(100)
    windows, places = find(counts, numbers, at_once)
    assert [expected[i] for i in numbers] == list(zip(windows, places, strict=True))


def test_no_window_is_counted_before_it_is_needed() -> None:
    counts = Counts(per_epoch=7)
    find(counts, [7])
    assert counts.num_known == 3


def test_what_was_counted_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "some" / "blocks.counts"
    counts = Counts(7, path, writes=True)
    find(counts, [50])
    again = Counts(7, path)
    assert again.num_known == counts.num_known
    assert find(again, [50, 3]) == find(Counts(7), [50, 3])
    assert again.num_known == counts.num_known


@pytest.mark.parametrize("damage", ["cut", "flip", "zeros"])
def test_a_torn_record_is_counted_again_and_overwritten(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "blocks.counts"
    find(Counts(7, path, writes=True), [50])
    whole = path.read_bytes()
    at = 5 * RECORD.itemsize + 3
    if damage == "cut":
        path.write_bytes(whole[:at])
    elif damage == "flip":
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    else:
        path.write_bytes(whole[: at - 3] + bytes(40))
    counts = Counts(7, path, writes=True)
    assert counts.num_known == 5
    find(counts, [50])
    assert path.read_bytes() == whole


def test_readers_do_not_write(tmp_path: Path) -> None:
    find(Counts(7, tmp_path / "x.counts"), [20])
    assert list(tmp_path.iterdir()) == []


def test_an_epoch_without_an_item_is_an_error_and_no_endless_search() -> None:
    counts = Counts(per_epoch=5)
    counts.add([0] * 4)
    with pytest.raises(DataError, match="nothing to read"):
        counts.add([0])
