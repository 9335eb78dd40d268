"""What reaches the console, and what does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from overland.config.schema import JobConfig
from overland.run_folder import RunFolder
from overland.training.console import Console, line_of, short_line_of
from overland.world import World

PROFILED = """
import torch
from torch.profiler import ProfilerActivity, profile, schedule
from overland.training.builtin_callbacks import quieten

quieten()
with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=1)) as p:
    for _ in range(5):
        torch.ones(2) + 1
        p.step()
"""


@pytest.mark.parametrize("launcher", ["", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_a_bar_is_drawn_on_a_terminal_of_ones_own(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpirun gives its ranks a terminal that nobody looks at."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID", "MPI_LOCALRANKID"):
        monkeypatch.delenv(name, raising=False)
    if launcher:
        monkeypatch.setenv(launcher, "0")
    run = cast(Any, SimpleNamespace(world=World(), config=JobConfig()))
    assert (Console(run).bar is None) == bool(launcher)


def test_what_an_objective_logs_is_shown_by_name() -> None:
    record = {"step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "accuracy": 0.75}
    record |= {"mfu": None, "memory_gib": 1.0, "data_wait": 0.0, "tokens_per_second": 10.0}
    assert line_of(record).endswith("1.00 GiB  accuracy 0.75")
    assert short_line_of(record).endswith("1.0 GiB  accuracy 0.75")


def test_the_profiler_says_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", PROFILED], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_runs_share_a_folder_of_events_outside_of_them_by_name(tmp_path: Path) -> None:
    def folder(name: str, tb: str) -> RunFolder:
        sections = {"job": {"dump_folder": name}, "metrics": {"save_tb_folder": tb}}
        return RunFolder.of(JobConfig.model_validate(sections))

    assert folder("runs/a", "tb").tb == Path("runs/a/tb")
    assert folder("runs/a", "/scratch/tb").tb == Path("/scratch/tb/a")
    assert folder(".", "/scratch/tb").tb == Path("/scratch/tb") / Path.cwd().name
