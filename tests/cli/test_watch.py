"""`overland watch` as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overland.apps.watch.status import Watch
from overland.cli.main import app
from overland.cli.watch import follow
from tests.cli.processes import environment
from tests.reporting.runs import add_events, line, make_run, set_live
from tests.waiting import LIMIT_SECONDS

END = {"event": "end", "how": "failed", "step": 5, "what": "disk full"}


@pytest.fixture(autouse=True)
def without_squeue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overland.apps.watch.status.queued", lambda which: None)


def test_one_frame_and_its_exit_code(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", done=5)
    for code, state in ((0, "training"), (3, "no sign of life"), (1, "failed: disk full")):
        set_live(run, time=time.time() if code == 0 else 1.0)
        if code == 3:
            (run / "metrics.jsonl").write_text(line(5, 1.0))
        if code == 1:
            add_events(run, END)
        done = CliRunner().invoke(app, ["watch", str(run), "--once"])
        assert (done.exit_code, state in done.stdout) == (code, True), done.output
    (run / "done").write_text("1000\n")
    assert CliRunner().invoke(app, ["watch", str(run)]).exit_code == 0  # no terminal: once
    done = CliRunner().invoke(app, ["watch", str(tmp_path / "none"), "--once"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        f"{tmp_path}/none does not exist (yet): expected a run folder, as set by job.dump_folder\n"
    )


def test_json_for_scripts(tmp_path: Path) -> None:
    run = make_run(tmp_path, done=5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(6, time.time(), loss=float("nan")))
    set_live(run, time=1.0)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    done = CliRunner().invoke(app, ["watch", str(run), "--json"])
    seen = json.loads(done.stdout, parse_constant=refuse)
    assert (seen["state"], seen["step"], seen["steps"]) == ("silent", 6, 1000)
    assert seen["newest"]["loss"] is None
    assert seen["losses"][0] == [1, 5.0]
    assert done.exit_code == 3


def test_without_a_run_it_shows_the_newest_below_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["watch", "--once"])
    assert done.exit_code == 2
    assert done.stderr.startswith("no runs in . or below it; `")
    for age, name in enumerate(("runs/new", "runs/old")):
        set_live(make_run(tmp_path / name, done=5), time=time.time() - 1000 * age)
    done = CliRunner().invoke(app, ["watch", "--json"])
    assert json.loads(done.stdout)["state"] == "training"
    assert done.stderr == "runs/new: the newest run here; `overland ls` lists all\n"


@pytest.mark.parametrize("option", ["--json", "--once"])
def test_a_live_page_is_neither_one_frame_nor_json(tmp_path: Path, option: str) -> None:
    run = make_run(tmp_path, done=5)
    done = CliRunner().invoke(app, ["watch", str(run), "--serve", "0", option])
    assert done.exit_code == 2
    assert "leave out --once and --json" in done.stderr


@pytest.mark.parametrize("module", ["apps.report.page", "apps.watch.status", "apps.console.screen"])
def test_what_shows_a_run_does_not_wait_for_torch(module: str) -> None:
    code = f"import sys\nimport overland.{module}\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment())
    assert done.returncode == 0


def test_it_starts_without_torch(tmp_path: Path) -> None:
    make_run(tmp_path, done=5)
    code = (
        "import sys\nfrom overland.cli.main import app\n"
        "app(['watch', sys.argv[1], '--once'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


class Terminal:
    """`overland watch RUN` in a terminal of its own."""

    def __init__(self, run: Path) -> None:
        self.pid, self.end = pty.fork()
        if self.pid == 0:
            words = ["-m", "overland", "watch", str(run), "--interval", "0.2"]
            env = environment(TERM="xterm", COLUMNS="100", LINES="40", PATH="/usr/bin:/bin")
            os.execve(sys.executable, [sys.executable, *words], env)
        self._written = b""
        self._deadline = time.monotonic() + LIMIT_SECONDS

    @property
    def seen(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._written.decode(errors="replace"))

    def until(self, words: str) -> None:
        while words not in self.seen:
            self._read()

    def exit_code(self) -> int:
        with contextlib.suppress(OSError):  # the other end is closed
            while self._read():
                continue
        os.close(self.end)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self) -> bytes:
        """What the screen shows next."""
        left = self._deadline - time.monotonic()
        ready, _, _ = select.select([self.end], [], [], max(0, left))
        assert ready, self.seen[-2000:]
        assert left > 0, self.seen[-2000:]
        more = os.read(self.end, 65536)
        self._written += more
        return more


@pytest.mark.parametrize("how", ["q", "Ctrl-C", "finished"])
def test_a_live_view_until_it_is_left_or_the_run_is_finished(tmp_path: Path, how: str) -> None:
    run = make_run(tmp_path, steps=20, done=5)
    set_live(run, time=time.time(), step=5)
    terminal = Terminal(run)
    terminal.until("5 of 20")
    set_live(run, time=time.time() + 1, step=11)
    terminal.until("11 of 20")
    if how == "q":
        os.write(terminal.end, b"q")
    elif how == "Ctrl-C":
        os.kill(terminal.pid, signal.SIGINT)
    else:
        (run / "done").write_text("20\n")
        set_live(run, time=time.time() + 2, step=20, state="ended")
    assert terminal.exit_code() == 0
    assert "Traceback" not in terminal.seen
    assert ("Finished: 20 steps in" in terminal.seen) == (how == "finished")


def test_a_view_without_a_keyboard_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, steps=5, done=5)
    (run / "done").write_text("5\n")
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    follow(Watch(run), interval=0.1)
    assert "Finished: 5 steps" in capsys.readouterr().out
