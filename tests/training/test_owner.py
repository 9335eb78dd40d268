"""Two runs in one folder are kept apart, and a dead one does not block anyone."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from overland.apps.proofs.pool import RankPool
from overland.errors import TakenError, TrainingError
from overland.run_folder import OWNER
from overland.training import owner
from overland.training.owner import (
    Ownership,
    owned,
    read_owner,
    require_free,
    take,
    this_owner,
)
from overland.world import World
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def without_squeue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "slurm_state", lambda job: None)


def held_by(folder: Path, **facts: Any) -> Path:
    """An owner on another machine, alive as far as anyone can tell."""
    path = folder / OWNER
    other = {**this_owner({}), "host": "elsewhere-1", "machine": "elsewhere", "process": 4711}
    path.write_text(json.dumps({**other, **facts}))
    return path


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds, time.time() - seconds))


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".owner")]


def test_a_folder_has_one_owner_until_it_is_given_back(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    mine = take(folder)
    with pytest.raises(TrainingError, match=f"process {os.getpid()} on "):
        take(folder)
    assert leftovers(folder) == []
    mine.release()
    assert list(folder.iterdir()) == []
    take(folder).release()


def test_the_refusal_says_who_has_it_and_the_ways_out(tmp_path: Path) -> None:
    age(held_by(tmp_path, job="123"), 42)
    with pytest.raises(TrainingError) as refused:
        take(tmp_path)
    said = str(refused.value)
    assert f"{tmp_path} is in use by job 123, process 4711 on elsewhere (since 2" in said
    assert "last seen alive 42 s ago" in said
    for way_out in (f"`touch {tmp_path}/STOP`", "`scancel 123`", "job.dump_folder",
                    f"remove {tmp_path}/owner.json"):  # fmt: skip
        assert way_out in said
    assert "\n" not in said


def test_what_was_killed_on_this_machine_is_followed_at_once(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from overland.training.owner import take\n"
        "take(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert (tmp_path / OWNER).exists()
    take(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("seconds", "free"), [(200, False), (400, True)])
def test_an_owner_nobody_can_be_asked_about_is_judged_by_its_last_sign(
    tmp_path: Path, seconds: float, free: bool
) -> None:
    age(held_by(tmp_path), seconds)
    if free:
        take(tmp_path).release()
    else:
        with pytest.raises(TrainingError):
            take(tmp_path)


@pytest.mark.parametrize(
    ("state", "seconds", "free"),
    [
        ("RUNNING", 1000, False),
        ("SUSPENDED", 1000, False),
        ("", 0, True),
        ("PENDING", 0, True),  # it was put back into the queue, so its ranks are gone
        ("FAILED", 0, True),
        ("COMPLETING", 100, True),
        (None, 0, False),
        (None, 400, True),
    ],
)
def test_slurm_knows_whether_a_job_elsewhere_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str | None, seconds: float, free: bool
) -> None:
    monkeypatch.setattr(owner, "slurm_state", lambda job: state)
    age(held_by(tmp_path, job="123"), seconds)
    if free:
        take(tmp_path).release()
    else:
        with pytest.raises(TrainingError):
            take(tmp_path)


def test_a_job_of_another_cluster_is_unknown_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "slurm_state", lambda job: "")  # gone, says the wrong squeue
    held_by(tmp_path, job="123", cluster="one")
    with pytest.raises(TrainingError):
        take(tmp_path, {"SLURM_CLUSTER_NAME": "two"})
    take(tmp_path, {"SLURM_CLUSTER_NAME": "one"}).release()


def test_a_link_waits_for_the_one_before_it_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm starts the next job of a chain while it still ends the processes of the last."""
    states = iter(["COMPLETING", "COMPLETING", ""])
    monkeypatch.setattr(owner, "slurm_state", lambda job: next(states))
    monkeypatch.setattr(owner.time, "sleep", lambda seconds: None)
    held_by(tmp_path, job="123")
    take(tmp_path).release()

    monkeypatch.setattr(owner, "slurm_state", lambda job: "COMPLETING")
    monkeypatch.setattr(owner, "PATIENCE_SECONDS", 0.0)
    held_by(tmp_path, job="123")
    with pytest.raises(TrainingError):
        take(tmp_path)


@pytest.mark.parametrize(
    ("first", "second", "free"),
    [
        ({"SLURM_STEP_ID": "0"}, {"SLURM_STEP_ID": "1"}, True),
        ({"SLURM_STEP_ID": "0"}, {"SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"}, True),
        ({}, {}, False),  # two commands in one shell of salloc
        ({"SLURM_STEP_ID": "0"}, {"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "1"}, False),
    ],
)
def test_the_next_attempt_of_a_job_follows_the_one_before(
    tmp_path: Path, first: dict[str, str], second: dict[str, str], free: bool
) -> None:
    before = take(tmp_path, {"SLURM_JOB_ID": "7", **first})
    if free:
        after = take(tmp_path, {"SLURM_JOB_ID": "7", **second})
        before.release()  # takes nothing away from the one that follows
        held = read_owner(tmp_path / OWNER)
        assert held is not None
        assert held.id == after.owner["id"]
        after.release()
    else:
        with pytest.raises(TrainingError):
            take(tmp_path, {"SLURM_JOB_ID": "7", **second})
        before.release()


@pytest.mark.parametrize(
    ("run", "restart", "free"), [("a", 1, True), ("a", 0, False), ("b", 1, False)]
)
def test_a_restart_by_torchrun_may_come_from_another_host(
    tmp_path: Path, run: str, restart: int, free: bool
) -> None:
    held_by(tmp_path, torchrun="a", torchrun_restart=0)
    env = {"TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_RESTART_COUNT": str(restart)}
    if free:
        take(tmp_path, env).release()
    else:
        with pytest.raises(TrainingError):
            take(tmp_path, env)


def test_restarts_of_runs_without_a_name_tell_nothing(tmp_path: Path) -> None:
    """torchrun calls every run "none" unless it is told another name."""
    held_by(tmp_path, torchrun="none")
    with pytest.raises(TrainingError):
        take(tmp_path, {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"})


@pytest.mark.parametrize("before", ["nobody", "a dead owner", "a dead heir", "rubbish"])
@pytest.mark.parametrize("links", [True, False])
def test_of_those_that_start_at_the_same_instant_one_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, links: bool
) -> None:
    if not links:

        def no_links(*_: object) -> None:
            raise OSError(errno.EPERM, "not here")

        monkeypatch.setattr(owner.os, "link", no_links)
    for round in range(25):
        folder = tmp_path / str(round)
        folder.mkdir()
        if before != "nobody":
            age(held_by(folder, id="x"), 1000)
        if before == "a dead heir":
            heir = folder / ".owner.x.heir"
            heir.write_text(json.dumps({**this_owner({}), "host": "elsewhere-2"}))
            age(heir, 1000)
        if before == "rubbish":
            (folder / OWNER).write_text("{")
            age(folder / OWNER, 1000)
        won = race(folder, 6)
        assert len(won) == 1
        held = read_owner(folder / OWNER)
        assert held is not None
        assert held.id == won[0].owner["id"]
        won[0].release()
        assert list(folder.iterdir()) == []


def race(folder: Path, num: int) -> list[Ownership]:
    won, gate = [], threading.Barrier(num)

    def start() -> None:
        gate.wait()
        with contextlib.suppress(TrainingError):
            won.append(take(folder))

    threads = [threading.Thread(target=start) for _ in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


def test_a_slow_one_does_not_follow_an_owner_that_has_been_followed(tmp_path: Path) -> None:
    """It found the owner dead, and slept while another one took the place and tidied up."""
    path = held_by(tmp_path)
    dead = read_owner(path)
    assert dead is not None
    age(path, 1000)
    quick = take(tmp_path)
    slow = this_owner({})
    with owner._written_beside(path, slow) as beside:
        assert not owner._inherit(path, dead, beside)
    held = read_owner(path)
    assert held is not None
    assert held.id == quick.owner["id"]
    assert leftovers(tmp_path) == []
    quick.release()


def test_an_owner_keeps_its_file_fresh_and_puts_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "RENEW_SECONDS", 0.02)
    mine = take(tmp_path)
    age(mine.path, 1000)
    wait_until(lambda: time.time() - mine.path.stat().st_mtime < 100)
    mine.path.unlink()
    wait_until(mine.path.exists)
    mine.release()
    assert list(tmp_path.iterdir()) == []


def test_an_owner_that_was_taken_for_dead_ends_before_it_writes_more(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from overland.training import owner\n"
        "owner.RENEW_SECONDS = 0.1; owner.take(Path(sys.argv[1])); print('mine', flush=True)\n"
        "time.sleep(60); print('wrote more')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "mine\n"
    held_by(tmp_path, job="9")
    said, problem = process.communicate(timeout=60)
    assert (said, process.returncode) == ("", 2)
    assert f"{tmp_path} was taken over by job 9, process 4711 on elsewhere" in problem


def enter(world: World, folder: Path) -> str:
    try:
        with owned(folder, world.is_first):
            raise KeyError
    except TrainingError as error:
        return str(error)
    except KeyError:
        return "entered"


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_learns_of_a_refusal(ranks: RankPool, tmp_path: Path, size: int) -> None:
    assert set(ranks.run(size, enter, tmp_path)) == {"entered"}
    assert list(tmp_path.iterdir()) == []  # given back, though it failed
    held_by(tmp_path)
    (said,) = set(ranks.run(size, enter, tmp_path))
    assert "is in use by process 4711" in said
    no_folder = tmp_path / "file"
    no_folder.touch()
    assert set(ranks.run(size, enter, no_folder)) == {f"{no_folder}: File exists"}


def test_a_launcher_refuses_what_a_process_of_its_machine_holds(tmp_path: Path) -> None:
    """Before it touches the logs. Of another machine it cannot tell by its own clock."""
    require_free(tmp_path)
    held = take(tmp_path)
    with pytest.raises(TakenError, match="is in use by"):
        require_free(tmp_path)
    held.release()
    elsewhere = {**this_owner({}), "host": "elsewhere", "machine": "elsewhere"}
    (tmp_path / OWNER).write_text(json.dumps(elsewhere))
    require_free(tmp_path)
