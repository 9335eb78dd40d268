"""What a run folder reveals, in any state."""

from __future__ import annotations

import json
import os
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from overland.apps.watch import status as watching
from overland.apps.watch.status import Queue, QueuedJob, RunStatus, Watch
from overland.apps.watch.view import draw, finished_words
from overland.config.schema import Job
from overland.errors import NoRun
from overland.processes import this_process
from overland.words import command, duration
from tests.reporting.runs import (
    ATTEMPT,
    FAULT,
    NOW,
    RECOVERED,
    SESSION,
    add_checkpoint,
    add_events,
    line,
    make_run,
    set_live,
)

RUNNING = QueuedJob("7", "RUNNING", "1:00:00", "None", "2026-01-01T00:00:00")
PENDING = QueuedJob("8", "PENDING", "2:00:00", "Dependency", "N/A")


real_squeue = watching.queued


@pytest.fixture(autouse=True)
def now_and_without_squeue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching.time, "time", lambda: NOW)
    in_queue(monkeypatch, None)


def in_queue(monkeypatch: pytest.MonkeyPatch, jobs: list[QueuedJob] | None) -> None:
    monkeypatch.setattr(watching, "queued", lambda which: jobs)


def look(run: Path) -> RunStatus:
    return Watch(run).look(patience=5.0)


def shown(seen: RunStatus, width: int = 120) -> str:
    console = Console(width=width, file=StringIO())
    console.print(draw(seen, width))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def set_owner(run: Path, age: float = 0.0, **facts: Any) -> None:
    owner = {**this_process(), "since": NOW - 3600, "job": "", **facts}
    (run / "owner.json").write_text(json.dumps(owner))
    os.utime(run / "owner.json", (NOW - age, NOW - age))


# The state in one word


def test_a_supervised_run_in_training(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=1000, done=50)
    add_events(run, SESSION, ATTEMPT)
    slowest = {"rank": 3, "node": "n1", "factor": 1.51}
    late = [{"rank": 9, "node": "n2", "phase": "save", "seconds": 31.0}]
    set_live(run, time=NOW + 1, step=52, slowest=slowest, late=late)
    add_checkpoint(run, "step_40")
    add_checkpoint(run, "step_45.preempt")
    add_checkpoint(run, "step_49", committed=False)
    add_checkpoint(run, ".step_50.tmp", committed=False)
    seen = look(run)
    assert (seen.state, seen.step, seen.steps) == ("training", 52, 1000)
    assert seen.step_seconds == pytest.approx(2.0)
    assert seen.seconds_left == pytest.approx(2.0 * 948)
    assert (seen.session, seen.attempt, seen.job, seen.ranks) == (1, 1, "7", 16)
    assert seen.nodes == ["n1", "n2"]
    found = seen.checkpoints
    assert (found.count, found.newest, found.saving) == (2, "step_45.preempt", "step_50")
    text = shown(seen)
    for words in ("training", "52 of 1,000", "5.2%", "31 min left, until", "0.1961",
                  "5,000 tokens/s", "MFU 41.0%", "memory 12.5 GiB", "2 s per step",
                  "session      1, attempt 1, job 7, 16 ranks, 2 nodes (n1, n2)",
                  "rank 3 on n1, 1.51 × the median", "rank 9 on n2 is late: 31 s in save",
                  "step_45.preempt", "2 in total", "saving step_50", "⠀"):  # fmt: skip
        assert words in text, words


def test_a_run_that_waits_for_a_save_says_so_and_gives_no_time_of_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=51, done=50, pace=0.5)
    add_checkpoint(run, ".step_50.tmp", committed=False)
    disk = {"bytes": 12_000_000_000, "total_bytes": 40_000_000_000, "quiet_seconds": 45.0}
    set_live(run, time=NOW + 1, phase="ending", stepped=NOW - 50, transfer=disk)
    (run / "metrics.jsonl").write_text(line(49, NOW - 51) + line(50, NOW - 50))
    seen = look(run)
    waits = "waiting for a save, 12.0 of 40.0 GB, no progress for 45 s"
    assert (seen.state, seen.because) == ("training", waits)
    text = shown(seen, 160)
    for words in ("1 s of training left", "last step 50 s ago", "saving step_50: 12.0 of 40.0 GB"):
        assert words in text
    assert "until" not in text
    set_live(run, time=NOW + 1, phase="saving", stepped=NOW - 2, transfer=disk)
    seen = look(run)
    assert (seen.state, seen.because) == ("training", ""), "a save in the background"
    assert "saving step_50: 12.0 of 40.0 GB, no progress for 45 s" in shown(seen, 160)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("preflight", "starting"),
        ("starting", "starting"),
        ("restarting", "restarting"),
        ("stopping", "stopping"),
        ("waiting for room", "starting"),
    ],
)
def test_what_a_supervisor_is_at(tmp_path: Path, state: str, expected: str) -> None:
    run = make_run(tmp_path, done=3)
    set_live(run, state=state)
    assert look(run).state == expected


def test_faults_are_told_with_what_was_done(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=50)
    oom = {**FAULT, "kind": "out of memory", "what": "rank 3 ran out of memory",
           "action": "stop", "excluded": []}  # fmt: skip
    add_events(run, SESSION, ATTEMPT, FAULT, {**ATTEMPT, "attempt": 2}, RECOVERED, oom)
    set_live(run, state="restarting", attempt=3)
    seen = look(run)
    assert [fault["lost_seconds"] for fault in seen.faults] == [95.0, None]
    text = shown(seen, 160)
    assert "restarting after a fault" in text
    assert "node lost at step 42: n2 does not answer → restart without n2, 95 s lost" in text
    assert "out of memory at step 42: rank 3 ran out of memory → stop\n" in " ".join(
        part.rstrip() + "\n" for part in text.splitlines()
    )


def test_the_marker_of_the_last_step_says_finished(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=50, done=50)
    (run / "done").write_text("50\n")
    add_events(run, SESSION, ATTEMPT, {"event": "end", "how": "finished", "step": 50, "what": ""})
    set_live(run, state="ended")
    seen = look(run)
    assert (seen.state, seen.seconds_left) == ("finished", None)
    assert finished_words(seen).startswith(f"Finished: 50 steps in {run}, with a loss of 0.19")
    longer = make_run(run, steps=80)  # it is to continue
    (longer / "live.json").unlink()
    (longer / "attempts.jsonl").unlink()
    assert look(longer).state == "stopped"


def test_a_chain_that_was_stopped_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_queue(monkeypatch, [PENDING])  # surplus links, which will end at once
    run = make_run(tmp_path, done=50)
    (run / "stopped").write_text("two attempts without a new step\n")
    set_live(run, state="ended")
    seen = look(run)
    assert (seen.state, seen.because) == ("stopped", "two attempts without a new step")
    add_events(run, SESSION, {"event": "end", "how": "failed", "step": 50, "what": "code error"})
    assert look(run).state == "failed"
    assert "stopped: two attempts without a new step" in shown(seen)


def test_between_two_sessions_it_waits_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, done=50)
    add_events(run, SESSION, {"event": "end", "how": "stopped", "step": 50, "what": "walltime"})
    set_live(run, state="ended")
    assert (look(run).state, look(run).because) == ("stopped", "walltime")
    expected = QueuedJob("8", "PENDING", "2:00:00", "Priority", "2030-01-01T10:00:00")
    in_queue(monkeypatch, [expected, PENDING, PENDING, PENDING])
    seen = look(run)
    assert (seen.state, seen.because) == ("waiting", "Priority")
    text = shown(seen)
    assert "waiting in the queue: Priority" in text
    assert "8 PENDING (Priority), expected 2030-01-01 10:00:00" in text
    assert "and 2 more waiting" in text
    assert "of training left" in text


def test_a_job_that_was_requeued_and_runs_again_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, done=50)
    end = {"event": "end", "how": "stopped", "step": 50, "what": "1 good node of 2 needed"}
    add_events(run, SESSION, {**FAULT, "action": "requeue"}, {**end, "time": NOW - 90})
    (run / "metrics.jsonl").write_text(line(50, NOW - 100))
    set_live(run, state="ended", time=NOW - 90)

    def in_state(state: str, reason: str, age: float) -> tuple[str, str]:
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(NOW - age))
        in_queue(monkeypatch, [QueuedJob("7", state, "1:00:00", reason, start)])
        return look(run).state, look(run).because

    assert in_state("RUNNING", "None", age=600) == ("stopped", end["what"]), "it is on its way out"
    assert in_state("PENDING", "BeginTime", age=-60) == ("waiting", "BeginTime")
    assert in_state("RUNNING", "None", age=30)[0] == "starting"
    assert "n2 does not answer → requeued without n2" in shown(look(run), 160)


def test_what_ended_a_job_from_outside_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm may kill the supervisor before it can write its last line."""
    run, what = make_run(tmp_path, done=50), "the job was cancelled (scancel, or preemption)"
    add_events(run, SESSION, {"event": "signal", "what": what})
    set_live(run, time=NOW + 5)
    set_owner(run, host="elsewhere-1")
    assert (look(run).state, look(run).because) == ("stopping", what)
    in_queue(monkeypatch, [])
    assert (look(run).state, look(run).because) == ("stopped", what)


def test_a_chain_that_ended_early_shows_how_to_resume_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, done=50)
    end = {"event": "end", "how": "stopped", "step": 50, "what": "step 50"}
    add_events(run, SESSION, end)
    (run / "submit").mkdir(exist_ok=True)
    for number in (2, 10):
        (run / "submit" / f"{number}.sh").write_text("#SBATCH --job-name=chain\n")
    in_queue(monkeypatch, [])
    assert look(run).resume == f"sbatch {run}/submit/10.sh"
    assert look(run).resume in shown(look(run), 400)
    in_queue(monkeypatch, [PENDING])
    assert "sbatch" not in shown(look(run), 400)
    in_queue(monkeypatch, [])
    (run / "stopped").write_text("disk full")
    assert "sbatch" not in shown(look(run), 400), "such a job would only say so again"


def test_a_session_that_failed(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=50)
    add_events(run, SESSION, {"event": "end", "how": "failed", "step": 50, "what": "disk full"})
    assert (look(run).state, look(run).because) == ("failed", "disk full")


@pytest.mark.parametrize(("age", "state"), [(50, "training"), (70, "silent")])
def test_silence_is_told(tmp_path: Path, age: float, state: str) -> None:
    run = make_run(tmp_path, pace=1.0)
    (run / "metrics.jsonl").write_text("".join(line(i, NOW - age - 9 + i) for i in range(9)))
    add_events(run, {**SESSION, "time": NOW - 5000})
    set_live(run, time=NOW - age, step_seconds=1.0)
    seen = look(run)
    assert seen.state == state
    assert seen.last_sign == pytest.approx(NOW - age)
    if state == "silent":
        assert "no sign of life since" in shown(seen)


def test_long_steps_are_given_their_time(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=50, pace=30.0)
    set_live(run, time=NOW - 500, step_seconds=30.0)
    assert look(run).state == "training"
    set_live(run, time=NOW - 700, step_seconds=30.0)
    assert look(run).state == "silent"


def test_a_job_that_runs_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, done=50)
    set_live(run, time=NOW - 300)
    in_queue(monkeypatch, [RUNNING])
    os.utime(run / "metrics.jsonl", (NOW - 300, NOW - 300))
    (run / "metrics.jsonl").write_text(line(50, NOW - 300))
    seen = look(run)
    assert (seen.state, seen.because) == ("training", "job 7 is running, but silent for 5 min")
    starts = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(NOW - 10))
    in_queue(monkeypatch, [QueuedJob("8", "RUNNING", "1:00:00", "None", starts)])
    assert look(run).state == "starting"


def test_a_plain_run_lives_as_long_as_its_owner(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=50)
    set_owner(run)
    assert look(run).state == "training"
    set_owner(run, since=NOW + 1)  # a new session that has not stepped yet
    assert look(run).state == "starting"
    set_owner(run, start="1")  # on this machine, dead
    assert look(run).state == "silent"
    set_owner(run, age=60, host="elsewhere-1")
    assert look(run).state == "training"
    set_owner(run, age=200, host="elsewhere-1")
    assert look(run).state == "silent"
    (run / "owner.json").unlink()
    seen = look(run)
    assert seen.state == "stopped"
    assert f"`{command('overland', 'train', run / 'config.toml')}`" in seen.because


# What may be missing or broken


def test_a_chain_that_was_only_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "submit").mkdir()
    for number in (2, 10):
        (tmp_path / f"submit/{number}.sh").write_text(f"#SBATCH --job-name=llama-{number}\n")
    (tmp_path / "submit/10.toml").write_text("[training]\nsteps = 70\n")
    asked = []
    monkeypatch.setattr(watching, "queued", lambda which: asked.append(which) or [PENDING])
    seen = look(tmp_path)
    assert asked == ["--name=llama-10"]
    assert (seen.state, seen.step, seen.steps) == ("waiting", 0, 70)
    assert "0 of 70" in shown(seen)


def test_what_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, said in {
        "later": "later does not exist (yet): expected a run folder",
        "file": "file is a file: expected a run folder",
        "empty": "empty is not a run folder: it contains none of config.toml, metrics.jsonl, ",
    }.items():
        with pytest.raises(NoRun) as refused:
            Watch(tmp_path / name)
        assert said in str(refused.value)


def test_broken_files_are_as_good_as_none(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=5)
    (run / "config.toml").write_text("[training\nste")
    (run / "live.json").write_text('{"time": 1, "st')
    (run / "owner.json").write_text("")
    (run / "attempts.jsonl").write_text('{"event": "session"\nnull\n{"event": "fault"}\n{"ev')
    (run / "done").write_text("")
    (run / "checkpoint").write_text("a file")
    seen = look(run)
    assert (seen.step, seen.steps, seen.checkpoints.count) == (5, None, 0)
    assert len(seen.faults) == 1
    assert "fault" in shown(seen)


def test_a_run_is_followed_while_it_grows(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    watched = Watch(run)
    assert watched.look().step == 0
    make_run(run, done=5)
    set_owner(run)
    assert watched.look().step == 5
    add_events(run, SESSION)
    (run / "owner.json").unlink()
    (run / "done").write_text("1000\n")
    seen = watched.look()
    assert (seen.state, seen.session) == ("finished", 1)


# Slurm


def fake_squeue(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(watching, "queued", real_squeue)
    (folder / "squeue").write_text(f"#!/bin/bash\n{script}\n")
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_jobs_are_read_from_squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_squeue(
        tmp_path, monkeypatch,
        "echo '10|PENDING|2:00:00|Dependency|N/A'; echo '9|RUNNING|1:00|None|2026-01-01T00:00:00'",
    )  # fmt: skip
    queue = Queue()
    queue.ask("--name=x", patience=20)
    assert queue.jobs is not None
    assert [job.id for job in queue.jobs] == ["9", "10"]
    assert [job.runs for job in queue.jobs] == [True, False]
    fake_squeue(tmp_path, monkeypatch, "echo 'Invalid job id specified' >&2; exit 1")
    assert watching.queued("--jobs=1") == []
    fake_squeue(tmp_path, monkeypatch, "echo 'Unable to contact controller' >&2; exit 1")
    assert watching.queued("--jobs=1") is None


def test_a_squeue_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_squeue(tmp_path, monkeypatch, "exec sleep 100")
    monkeypatch.setattr(watching, "ANSWER_SECONDS", 3.0)
    run = make_run(tmp_path / "run", done=5)
    set_live(run)
    watched = Watch(run)
    seen = [watched.look(), watched.look(), watched.look(patience=0.1)][-1]
    assert (seen.state, seen.queue) == ("training", None)
    thread = watched.queue._thread
    assert thread is not None
    assert thread.is_alive(), "three looks, and squeue has not answered yet"
    thread.join()
    assert watched.queue.jobs is None


def test_durations_in_words() -> None:
    assert [duration(s) for s in (5, 119, 120, 3700, 90000, -3)] == [
        "5 s", "119 s", "2 min", "1 h 1 min", "1 d 1 h", "0 s",
    ]  # fmt: skip


def test_every_state_has_a_word_and_a_color() -> None:
    from overland.apps.watch.view import COLORS

    assert set(COLORS) == set(watching.STATES)


def test_the_step_is_that_of_the_newest_checkpoint_if_less_is_logged(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=40, done=10)
    saved = run / "checkpoint" / "step_13.preempt"
    saved.mkdir(parents=True)
    (saved / "COMMITTED").touch()
    assert Watch(run).look().step == 13


def test_a_description_that_nobody_wrote_is_not_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", done=10)
    assert Watch(run).look().description == "A tiny run"
    (run / "config.toml").write_text(f'[job]\ndescription = "{Job().description}"\n')
    assert Watch(run).look().description == ""


def test_a_session_that_failed_by_itself_is_told_with_its_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=40, done=40)
    end = {"event": "end", "how": "failed", "what": "notes.txt is empty"}
    (run / "sessions.jsonl").write_text(json.dumps({"event": "start"}) + "\n" + json.dumps(end))
    seen = Watch(run).look()
    assert (seen.state, seen.because) == ("failed", "notes.txt is empty")
