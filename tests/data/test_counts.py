from pathlib import Path

import numpy as np
import pytest

from overland.data.order import RECORD, Counts
from overland.errors import DataError

SIZES = [3, 0, 5, 1, 0, 0, 2] * 20


def counting(asked: list[int], at_once: int = 1):  # type: ignore[no-untyped-def]
    def count(first: int) -> list[int]:
        asked.append(first)
        return SIZES[first : first + at_once]

    return count


@pytest.mark.parametrize("at_once", [1, 4])
def test_items_are_found_in_their_windows(at_once: int) -> None:
    counts = Counts(counting([], at_once), per_epoch=7)
    expected = [(window, place) for window, size in enumerate(SIZES) for place in range(size)]
    numbers = np.random.default_rng(0).permutation(100)
    windows, places = counts.find(numbers)
    assert [expected[i] for i in numbers] == list(zip(windows, places, strict=True))


def test_no_window_is_counted_before_it_is_needed() -> None:
    asked: list[int] = []
    counts = Counts(counting(asked), per_epoch=7)
    counts.find([7])
    assert asked == [0, 1, 2]


def test_what_was_counted_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "some" / "blocks.counts"
    Counts(counting([]), 7, path, writes=True).find([50])
    asked: list[int] = []
    again = Counts(counting(asked), 7, path)
    assert [x.tolist() for x in again.find([50, 3])] == [
        x.tolist() for x in Counts(counting([]), 7).find([50, 3])
    ]
    assert asked == []


@pytest.mark.parametrize("damage", ["cut", "flip", "zeros"])
def test_a_torn_record_is_counted_again_and_overwritten(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "blocks.counts"
    Counts(counting([]), 7, path, writes=True).find([50])
    whole = path.read_bytes()
    at = 5 * RECORD.itemsize + 3
    if damage == "cut":
        path.write_bytes(whole[:at])
    elif damage == "flip":
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    else:
        path.write_bytes(whole[: at - 3] + bytes(40))
    asked: list[int] = []
    Counts(counting(asked), 7, path, writes=True).find([50])
    assert asked[0] == 5
    assert path.read_bytes() == whole


def test_readers_do_not_write(tmp_path: Path) -> None:
    Counts(counting([]), 7, tmp_path / "x.counts").find([20])
    assert list(tmp_path.iterdir()) == []


def test_an_epoch_without_an_item_is_an_error_and_no_endless_search() -> None:
    with pytest.raises(DataError, match="nothing to read"):
        Counts(lambda first: [0], per_epoch=5).find([0])
