"""What reaches the console, and what does not."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overland.apps.console.bar import (
    StepTimes,
    draw,
    in_words,
    line_of,
    others,
    smoothed,
    sparkline,
)
from overland.apps.console.screen import Screen
from overland.apps.console.show import next_commands
from overland.config.schema import JobConfig
from overland.run_folder import RunFolder
from overland.world import World
from overland.world.heartbeat import Heartbeat, Phase

PROFILED = """
import torch
from torch.profiler import ProfilerActivity, profile, schedule
from overland.training.callbacks import quieten

quieten()
with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=1)) as p:
    for _ in range(5):
        torch.ones(2) + 1
        p.step()
"""


def test_the_next_command_trains_longer_than_what_is_done(tmp_path: Path) -> None:
    """Also if the config asks for fewer steps than were taken before."""
    for settings, done, longer in (
        ({"steps": 10}, 10, "training.steps=20"),
        ({"steps": 10}, 60, "training.steps=120"),
        ({"steps": 10, "epochs": 1.0}, 60, "training.epochs=12"),
    ):
        config = JobConfig.model_validate(
            {"job": {"dump_folder": str(tmp_path)}, "training": settings}
        )
        run: Any = SimpleNamespace(
            config=config, folder=RunFolder(config), dataset=SimpleNamespace(tokenizer=None)
        )
        assert any(one.endswith(longer) for one in next_commands(run, done))


WIDTHS = (40, 80, 120, 200)
COLUMNS = {"step": "1,234/100,000", "speed": "21,809 tok/s"} | in_words(
    {"epoch": 0.5, "loss": 3.21, "lr": 2e-3, "grad_norm": 0.5, "mfu": 0.41, "memory_gib": 12.3,
     "elapsed": 75, "left": 3 * 3600}
)  # fmt: skip
LOSSES = [4.0, 3.5, 3.2, 3.1]


@pytest.mark.parametrize(
    ("changes", "is_one"),
    [
        ({}, True),
        ({"OMPI_COMM_WORLD_RANK": "0"}, False),  # mpirun's terminal is one that nobody looks at
        ({"PMI_RANK": "0"}, False),
        ({"CI": "true"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_a_line_is_drawn_on_a_terminal_of_ones_own(
    changes: dict[str, str], is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID", "MPI_LOCALRANKID", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    first = Screen.of(JobConfig(), World(), [0], Heartbeat())
    assert first.is_live == is_one
    # Another rank that prints would write into the line.
    assert not Screen.of(JobConfig(), World(), [0, 1], Heartbeat()).is_live
    assert not Screen.of(JobConfig(), World(rank=1, size=2), [0], Heartbeat()).is_live


def test_the_line_is_as_wide_as_the_terminal_and_drops_what_matters_least() -> None:
    drawn = {width: draw(COLUMNS, 0.01, LOSSES, width).plain for width in WIDTHS}
    assert [len(line) for line in drawn.values()] == list(WIDTHS)
    assert drawn[40].split() == ["1,234/100,000", "loss~3.2100", "3:00:00", "left"]
    words = ["epoch 0.50", "loss~3.2100", "█▄▂▁", "lr 2.00e-03", "grad 0.50", "21,809 tok/s",
             "MFU 41.0%", "12.3 GiB", "1:15", "3:00:00 left"]  # fmt: skip
    assert all(word in drawn[200] for word in words)
    # Whoever is told more is told all of what others are told.
    shown = [{word for word in words if word in drawn[width]} for width in WIDTHS]
    assert shown[0] < shown[1] < shown[2] < shown[3]
    assert all("1,234/100,000" in line for line in drawn.values())
    assert "━━━━" in drawn[80]


def test_what_is_waited_for_takes_the_place_of_the_bar() -> None:
    waiting = COLUMNS | {"doing": "validating"}
    for width in WIDTHS:
        line = draw(waiting, 0.01, LOSSES, width).plain
        assert line.startswith("validating  ")
        assert "━" not in line
    assert len(draw(COLUMNS | {"doing": "x" * 300}, 0.01, LOSSES, 80).plain) <= 80


def test_a_terminal_without_unicode_gets_ascii() -> None:
    draw(COLUMNS, 0.01, LOSSES, 200, is_ascii=True).plain.encode("ascii")


def test_a_sparkline_shows_the_course_of_a_loss() -> None:
    assert sparkline([], 8) == sparkline([1.0], 8) == ""
    assert sparkline([1.0, 1.0], 8) == "▁▁"
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert len(sparkline(list(range(1000)), 24)) == 24
    assert sparkline([2.0, math.nan, 1.0], 8) == "█ ▁"
    assert sparkline([math.nan, math.inf], 8) == ""


def test_the_loss_is_smoothed_unless_it_is_broken() -> None:
    assert smoothed([]) is None
    assert smoothed([3.0]) == 3.0
    assert 2.0 < (smoothed([4.0] * 5 + [2.0]) or 0) < 4.0
    assert smoothed([2.0, math.inf, 2.0]) == 2.0
    assert math.isnan(smoothed([2.0, math.nan]) or 0)


def test_plain_lines_say_what_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("overland.apps.console.screen.SILENT_SECONDS", 0.0)
    beat, said = Heartbeat(), ""
    beat.enter(Phase.BUILDING, doing="compiling")
    with Screen(beat=beat):
        deadline = time.monotonic() + 60
        while "still" not in said and time.monotonic() < deadline:
            time.sleep(0.05)
            said += capsys.readouterr().out
    assert "still compiling, for " in said


def test_the_pace_leaves_out_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = StepTimes(step=10)
    now = 100.0  # compiled
    pace.step(11)
    assert pace.left(steps=20) is None
    now = 102.0
    pace.step(12)
    assert pace.left(steps=20) == 16.0
    assert pace.elapsed == 102.0


def test_what_an_objective_logs_is_shown_by_name() -> None:
    record = {"step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "accuracy": 0.75}
    record |= {"mfu": None, "memory_gib": 1.0, "data_wait": 0.0, "tokens_per_second": 10.0}
    assert line_of(record).endswith("1.00 GiB  accuracy 0.75")
    assert others(record) == "  accuracy 0.75"


def test_the_profiler_says_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", PROFILED], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_runs_share_a_folder_of_events_outside_of_them_by_name(tmp_path: Path) -> None:
    def folder(name: str, tb: str) -> RunFolder:
        sections = {"job": {"dump_folder": name}, "metrics": {"save_tb_folder": tb}}
        return RunFolder(JobConfig.model_validate(sections))

    assert folder("runs/a", "tb").tb == Path("runs/a/tb")
    assert folder("runs/a", "/scratch/tb").tb == Path("/scratch/tb/a")
    assert folder(".", "/scratch/tb").tb == Path("/scratch/tb") / Path.cwd().name
