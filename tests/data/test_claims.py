import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from overland.data import shard_maker as claims
from overland.data.shard_maker import Claims
from tests.waiting import wait_until


def owner_of(path: Path) -> dict[str, object]:
    return dict(json.loads(path.read_text()))


def test_a_claim_is_held_by_one_and_free_once_released(tmp_path: Path) -> None:
    path = tmp_path / "1.claim"
    mine = Claims(tmp_path).take(path)
    assert mine is not None
    assert Claims(tmp_path).is_live(path)
    assert Claims(tmp_path).take(path) is None
    mine.release()
    assert not Claims(tmp_path).is_live(path)
    assert Claims(tmp_path).take(path) is not None


def test_the_claim_of_a_dead_process_is_taken_over_with_what_it_left(tmp_path: Path) -> None:
    path = tmp_path / "1.claim"
    code = (
        "import sys; from pathlib import Path; from overland.data.shard_maker import Claims\n"
        "path = Path(sys.argv[1]); claim = Claims(path.parent).take(path)\n"
        "claim.part.write_text('half'); print(claim.part)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    part = Path(done.stdout.strip())
    assert part.exists()
    assert not Claims(tmp_path).is_live(path)
    mine = Claims(tmp_path).take(path)
    assert mine is not None
    assert owner_of(path)["process"] == os.getpid()
    assert not part.exists()


def test_a_process_that_ended_unnoticed_by_its_parent_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "1.claim"
    code = (
        "import sys; from pathlib import Path; from overland.data.shard_maker import Claims\n"
        "path = Path(sys.argv[1]); Claims(path.parent).take(path)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert not Claims(tmp_path).is_live(path)
    process.wait()


def test_a_number_that_was_given_to_another_process_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "1.claim"
    assert Claims(tmp_path).take(path)
    path.write_text(json.dumps({**owner_of(path), "start": "1"}))
    assert not Claims(tmp_path).is_live(path)


def claim_of_another_node(path: Path) -> None:
    path.write_text(json.dumps({"host": "elsewhere-1", "process": 1, "start": "1", "number": 1}))


def test_a_claim_of_another_node_is_live_while_it_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "1.claim"
    claim_of_another_node(path)
    assert Claims(tmp_path).is_live(path)
    past = time.time() - claims.STALE_SECONDS - 5
    os.utime(path, (past, past))
    assert not Claims(tmp_path).is_live(path)
    assert Claims(tmp_path).take(path) is not None


def test_a_claim_from_a_clock_in_the_future_is_not_live_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "STALE_SECONDS", 0.2)
    path = tmp_path / "1.claim"
    claim_of_another_node(path)
    future = time.time() + 3600
    os.utime(path, (future, future))
    seen = Claims(tmp_path)
    assert seen.is_live(path)
    wait_until(lambda: not seen.is_live(path))


def test_a_claim_that_was_made_and_never_written_goes_stale(tmp_path: Path) -> None:
    path = tmp_path / "1.claim"
    path.touch()
    assert Claims(tmp_path).is_live(path)
    past = time.time() - claims.STALE_SECONDS - 5
    os.utime(path, (past, past))
    assert Claims(tmp_path).take(path) is not None


def test_a_holder_keeps_its_claim_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "TOUCH_SECONDS", 0.0)
    path = tmp_path / "1.claim"
    mine = Claims(tmp_path).take(path)
    assert mine is not None
    os.utime(path, (1, 1))
    mine.touch()
    assert path.stat().st_mtime > 1


def test_one_who_lost_a_claim_does_not_release_the_next_holders(tmp_path: Path) -> None:
    path = tmp_path / "1.claim"
    mine = Claims(tmp_path).take(path)
    assert mine is not None
    claim_of_another_node(path)
    mine.release()
    assert path.exists()
