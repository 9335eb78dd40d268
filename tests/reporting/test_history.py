"""metrics.jsonl is followed as it grows, whatever happens to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overland.apps.watch import history
from overland.apps.watch.history import History
from overland.cluster.supervise import events
from tests.reporting.runs import line


def follow(path: Path) -> History:
    found = History(path)
    found.read_on()
    return found


def test_a_line_counts_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    found = follow(path)
    assert found.newest == {}
    with path.open("w") as file:
        for text in (line(1), line(2)[:30]):
            file.write(text)
        file.flush()
        found.read_on()
        assert [step for step, _ in found.losses] == [1]
        file.write(line(2)[30:])
    found.read_on()
    assert [step for step, _ in found.losses] == [1, 2]


def test_values_that_are_no_numbers_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    odd = "".join(f'{{"step": {step}, "loss": 1}}\n' for step in ("1e400", "9e99", "true", "-1"))
    odd += '{"step": 2, "loss": NaN, "time": null, "mfu": null}\n'
    path.write_text(line(1, 5.0) + odd + line(3, 6.0))
    found = follow(path)
    assert [step for step, _ in found.losses] == [1, 2, 3]
    assert found.pace == pytest.approx(0.5)


def test_lines_that_were_cut_short_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2)[:40] + line(3) + "null\n[]\n7\n\n" + line(4))
    assert [step for step, _ in follow(path).losses] == [1, 4]


@pytest.mark.parametrize("how", ["replaced", "cut", "removed"])
def test_a_file_that_is_another_is_begun_again(tmp_path: Path, how: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2))
    found = follow(path)
    if how == "replaced":
        (tmp_path / "new").write_text(line(1, loss=7.0) + line(2) + line(3))
        (tmp_path / "new").rename(path)
        expected = [1, 2, 3]
    elif how == "cut":
        path.write_text(line(9))
        expected = [9]
    else:
        path.unlink()
        expected = []
    found.read_on()
    assert [step for step, _ in found.losses] == expected


def test_the_pace_knows_nothing_of_restarts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    times = [10.0, 12.0, 14.0, 18.0, 9000.0, 9002.0]
    path.write_text("".join(line(10 * i, time) for i, time in enumerate(times)))
    found = follow(path)
    assert found.step_seconds == pytest.approx(0.2)
    assert found.pace == pytest.approx((2 + 2 + 4 + 2) / 4 / 10)


def test_a_step_that_is_logged_twice_does_not_count_for_the_pace(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, 10.0) + line(1, 11.0) + line(2, 12.0))
    assert follow(path).pace == pytest.approx(1.0)


def test_without_times_there_is_no_pace(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2))
    assert follow(path).pace is None


def test_a_long_file_is_sampled_but_for_its_end_and_what_is_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundredth of the sizes, so that 10,000 lines stand for a million."""
    monkeypatch.setattr(events, "CHUNK", events.CHUNK // 100)
    monkeypatch.setattr(history, "WHOLE_BYTES", history.WHOLE_BYTES // 100)
    monkeypatch.setattr(history, "END_BYTES", history.END_BYTES // 100)
    parsed = 0

    def counting(text: bytes) -> Any:
        nonlocal parsed
        parsed += 1
        return json.loads(text)

    monkeypatch.setattr(history, "object_in", counting)
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(1, 10_001):
            file.write(line(step, float(step)))
            if step in (777, 5003):
                file.write(json.dumps({"step": step, "validation_loss/wiki": 3.0}) + "\n")
    found = follow(path)
    assert parsed < 1000
    assert found.held_out == {"wiki": [(777, 3.0), (5003, 3.0)]}
    assert found.losses[0][0] == 1
    assert [step for step, _ in found.losses[-30:]] == list(range(9971, 10_001))

    parsed = 0
    found.read_on()
    with path.open("a") as file:
        file.write(line(10_001))
    found.read_on()
    assert parsed == 1
    assert found.newest["step"] == 10_001
