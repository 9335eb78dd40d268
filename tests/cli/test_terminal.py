"""`overland train` in a terminal: a real one, as far as the process can tell."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from tests.cli.processes import TINY, environment
from tests.cli.warm import Command
from tests.waiting import LIMIT_SECONDS

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BAR = "━"


class InTerminal(Command):
    """A command whose output goes to a pseudo-terminal."""

    def __init__(self, *words: str, cwd: Path, width: int, **env: str) -> None:
        self.terminal, theirs = pty.openpty()
        self.said = ""
        self.resize(width)
        wanted = {"TERM": "xterm-256color", "NGPU": "1", **env}
        everything = {k: v for k, v in environment(**wanted).items() if k not in ("CI", "COLUMNS")}
        super().__init__(words, cwd, everything, into=theirs)
        os.close(theirs)

    def resize(self, width: int) -> None:
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))

    def read_until(self, found: re.Pattern[str]) -> str:
        """Reads on, and returns the first line from here on that is like this."""
        begin, deadline = len(self.said), time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            for line in lines(self.said[begin:])[:-1]:
                if found.search(line):
                    return line
            if not self._read():
                break
        raise AssertionError(f"no line like {found.pattern}:\n{self.said[-5000:]}")

    def read_all(self) -> str:
        while self._read():
            pass
        self.wait()
        return self.said

    def _read(self) -> bool:
        ready, _, _ = select.select([self.terminal], [], [], 0.5)
        if not ready:
            return self.poll() is None
        try:
            self.said += os.read(self.terminal, 65536).decode(errors="replace")
        except OSError:  # the other side is closed
            return False
        return True


def lines(said: str) -> list[str]:
    """What was written between two beginnings of a line, without colors."""
    return [ESCAPES.sub("", line) for line in re.split(r"\r\n|\r|\n", said)]


def test_the_bar_is_as_wide_as_the_terminal_and_what_is_said_stays(tmp_path: Path) -> None:
    texts = [f"{i * i} is the square of {i}" for i in range(500)]
    (tmp_path / "squares.jsonl").write_text("".join(f'{{"text": "{one}"}}\n' for one in texts))
    words = ["train", "quickstart", *TINY, "training.dataset_path=squares.jsonl",
             "data.folder=made",
             "model.overrides.vocab_size=300", "data.vocab_size=300", "data.holdout=0.1",
             "training.steps=100000", "validation.steps=1", "validation.freq=20",
             "checkpoint.interval=100000"]  # fmt: skip
    run = InTerminal(*words, cwd=tmp_path, width=200)
    wide = run.read_until(re.compile(rf"{BAR}.* left$"))
    opening = "\n".join(lines(run.said))
    for name in (
        "model ",
        "data ",
        "batch ",
        "devices ",
        "layout ",
        "precision ",
        "memory ",
        "run ",
    ):
        assert re.search(rf"^{name} +\S", opening, flags=re.MULTILINE), name
    assert len(wide) == 200
    for word in ("/100,000", "epoch ", "loss~", "lr ", "grad ", " tok/s", " GiB", " left"):
        assert word in wide
    run.resize(80)
    assert len(run.read_until(re.compile(rf"^{BAR}.{{,79}} left$"))) == 80
    run.resize(40)
    narrow = run.read_until(re.compile(r"^[^━]{,40} left$"))
    assert re.fullmatch(r"[\d,]+/100,000  loss~[\d.]+(  [▁-█]+)?  \S.* left", narrow)
    run.read_until(re.compile(r"^step \d+  validation_loss/squares.jsonl "))
    os.killpg(run.pid, signal.SIGINT)
    said = run.read_all()
    assert run.returncode == 75
    assert "Stopped after step" in said
    assert said.rfind("\x1b[?25h") > said.rfind("\x1b[?25l")  # the cursor is there again
    # The lines that were said stand by themselves, with nothing of the bar in them.
    kept = [line for line in lines(said) if "validation_loss/" in line]
    assert kept
    assert all(re.fullmatch(r"step \d+  validation_loss/\S+ [\d.]+ \(.*\)", line) for line in kept)


def test_whoever_leaves_at_once_shows_the_cursor_again() -> None:
    """As after Ctrl-C before the first step, and after a second one."""
    terminal, theirs = pty.openpty()
    program = "from overland.world.signals import leave; leave(75, 'stopped')"
    done = subprocess.run([sys.executable, "-c", program], env=environment(TERM="xterm"),
                          stdout=theirs, stderr=theirs, timeout=LIMIT_SECONDS)  # fmt: skip
    assert done.returncode == 75
    assert b"\x1b[?25hstopped" in os.read(terminal, 4096)
    os.close(theirs)
    os.close(terminal)


def test_letters_that_the_terminal_lacks_and_closed_outputs_end_nothing(tmp_path: Path) -> None:
    for number, how in enumerate(("PYTHONIOENCODING=ascii", ">&-")):
        run = f"runs/größe {number}"
        train = [sys.executable, "-m", "overland", "train", "quickstart", *TINY,
                 "training.steps=2", f"job.dump_folder={run}"]  # fmt: skip
        for words in (train, [sys.executable, "-m", "overland", "ls"]):
            command = shlex.join(words)
            command = f"{command} {how}" if how.startswith(">") else f"{how} {command}"
            done = subprocess.run(
                ["bash", "-c", command], cwd=tmp_path, env=environment(NGPU="1"),
                capture_output=True, timeout=LIMIT_SECONDS,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr.decode(errors="replace")
        assert (tmp_path / run / "done").exists()
