"""`overland ls` finds runs, reports their state, and survives whatever lies between them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from overland.apps.watch.history import History
from overland.apps.watch.listing import list_runs, table
from overland.cli.main import app
from tests.reporting.runs import line, make_run, set_live


@pytest.fixture(autouse=True)
def without_squeue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overland.apps.watch.status.queued", lambda which: None)


def ls(*words: object) -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, ["ls", *map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_runs_are_listed_newest_first_with_state_step_and_loss(tmp_path: Path) -> None:
    old = make_run(tmp_path / "a" / "old", steps=20)
    (old / "metrics.jsonl").write_text(line(20, 1000.0))
    (old / "done").write_text("20\n")
    new = make_run(tmp_path / "b" / "c" / "new", done=5)
    set_live(new, time=time.time(), step=5)
    with (new / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "validation_loss/val": 1.25, "time": time.time()}) + "\n")
    first, second = ls(tmp_path)
    assert (first["run"], first["state"], first["step"]) == (str(new), "training", 5)
    assert first["steps"] == 1000
    assert first["loss"] == pytest.approx(10 / 6)
    assert first["held_out"] == {"val": 1.25}
    assert first["age_seconds"] < second["age_seconds"]
    assert (second["run"], second["state"], second["step"]) == (str(old), "finished", 20)
    shown = CliRunner().invoke(app, ["ls", str(tmp_path)]).stdout.splitlines()
    assert shown[0].split() == ["run", "state", "step", "loss", "held", "out", "age"]
    assert "5/1,000" in shown[1]
    assert "1.2500" in shown[1]
    assert "finished" in shown[2]


def test_what_is_no_run_is_left_out_and_what_is_torn_is_listed(tmp_path: Path) -> None:
    make_run(tmp_path / "good", done=3)
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.toml").write_text("[site]\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "loop").symlink_to(tmp_path)
    hidden = make_run(tmp_path / ".hidden" / "run", done=3)
    assert hidden.is_dir()
    torn = make_run(tmp_path / "torn", done=3)
    (torn / "config.toml").write_bytes(b"\xff\x00[[[")
    (torn / "metrics.jsonl").write_bytes(b'{"step": 1, "loss"\n[1]\nnull\n{"step": "x"}\n\xff\n')
    (torn / "live.json").write_text('{"time": "yesterday", "step": [], "nodes": 7}')
    (torn / "owner.json").write_text("[]")
    odd = tmp_path / os.fsdecode(b"odd\xff\x1b[31m")
    make_run(odd, done=1)
    lines = make_run(tmp_path / "two\nlines", done=1)
    piped = make_run(tmp_path / "piped", done=1)
    for name in ("metrics.jsonl", "config.toml", "done"):
        (piped / name).unlink(missing_ok=True)
        os.mkfifo(piped / name)
    found = {Path(one["run"]).name: one for one in ls(tmp_path)}
    assert set(found) == {"good", "torn", odd.name, lines.name, "piped"}
    assert found["good"]["step"] == 3
    done = CliRunner().invoke(app, ["ls", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.stdout
    assert done.stdout.count("\n") == 1 + len(found)


def test_folders_with_the_names_of_files_and_recorded_runs_are_no_runs(tmp_path: Path) -> None:
    for name in ("data", "submit", "metrics.jsonl", "sessions.jsonl"):
        (tmp_path / "project" / name).mkdir(parents=True)
    (tmp_path / "project" / "config.toml").write_text("")
    make_run(tmp_path / "tests" / "recorded", done=3)
    (tmp_path / "tests" / ".overlandignore").touch()
    waiting = make_run(tmp_path / "waiting")
    (waiting / "submit").mkdir()
    (waiting / "submit" / "1.sh").write_text("")
    odd = make_run(tmp_path / "odd")
    (odd / "metrics.jsonl").mkdir()
    (odd / "sessions.jsonl").write_text("")
    found = {Path(one["run"]).name: one for one in ls(tmp_path)}
    assert set(found) == {"waiting", "odd"}
    assert found["odd"]["state"] == "unreadable"
    assert "metrics.jsonl is a folder" in found["odd"]["because"]
    assert [Path(one["run"]).name for one in ls(tmp_path / "tests")] == ["recorded"]


def test_more_steps_than_the_config_now_asks_for(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=10, done=60)
    (run / "done").write_text("60\n")
    (listed,) = list_runs(tmp_path)
    assert (listed.state, listed.step, listed.steps) == ("finished", 60, 10)
    assert "60/10" not in table([listed], 200)[1]
    shown = CliRunner().invoke(app, ["watch", str(run), "--once"]).stdout
    assert "600" not in shown
    assert "training.steps = 10" in shown


def test_a_run_that_cannot_be_read_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "good", done=3)
    make_run(tmp_path / "bad", done=3)
    usual = History.read_on

    def read_on(self: History) -> None:
        if "bad" in str(self._tail.path):
            raise PermissionError(13, "Permission denied", str(self._tail.path))
        usual(self)

    monkeypatch.setattr(History, "read_on", read_on)
    found = {Path(one["run"]).name: one for one in ls(tmp_path)}
    assert found["good"]["step"] == 3
    assert found["bad"]["state"] == "unreadable"
    assert "Permission denied" in found["bad"]["because"]


def test_nothing_to_list(tmp_path: Path) -> None:
    assert ls(tmp_path) == []
    done = CliRunner().invoke(app, ["ls", str(tmp_path)])
    assert (done.exit_code, done.stdout) == (0, "")
    assert "no runs in" in done.stderr
    done = CliRunner().invoke(app, ["ls", str(tmp_path / "none")])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "does not exist: expected a folder that contains runs" in done.stderr


def test_lines_fit_a_terminal(tmp_path: Path) -> None:
    make_run(tmp_path / ("long" * 40), done=3)
    for width in (80, 120, 200):
        lines = table(list_runs(tmp_path), width)
        assert all(len(one) <= width for one in lines)
        assert "3/1,000" in lines[1]


def test_a_step_that_is_no_whole_number_is_not_listed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", done=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9e99, "loss": 1.0}\n')
    set_live(run, step=9e99)
    assert ls(tmp_path)[0]["step"] == 3


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step, float(step)) for step in range(1, 201)))
    history = History(path, last_bytes=5 * len(line(200, 200.0)))
    history.read_on()
    assert [step for step, _ in history.losses] == [196, 197, 198, 199, 200]
    with path.open("a") as file:
        file.write(line(201, 201.0))
    history.read_on()
    assert history.newest["step"] == 201


def test_a_config_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=50, done=50)
    (run / "done").write_text("50\n")
    (before,) = ls(run)
    assert (before["state"], before["because"]) == ("finished", "")
    (run / "config.toml").write_text("[training\n")
    assert "config.toml cannot be read" in ls(run)[0]["because"]
