"""Two `overland train` on one run folder, and an `overland watch` that sees them come and go."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from overland.checkpoint.folder import latest_checkpoint
from overland.cli.main import app
from tests.cli.processes import TINY, interrupt, overland, start_overland, wait_for_step

RUN = Path("runs/quickstart")
WORDS = [
    "train", "quickstart", *TINY, "validation.enable=false", "training.dataset=random",
    "metrics.enable_tensorboard=false", "metrics.sample_prompt=", "checkpoint.interval=20",
    "training.steps=100000",
]  # fmt: skip


def watched(folder: Path) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["watch", str(folder), "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_a_second_run_is_refused_and_changes_nothing_until_the_first_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = start_overland(*WORDS, cwd=tmp_path, NGPU="1")
    try:
        wait_for_step(RUN / "metrics.jsonl", 30)
        step = 30
        while latest_checkpoint(RUN / "checkpoint") is None:  # saved while training continues
            step += 10
            wait_for_step(RUN / "metrics.jsonl", step)
        code, seen = watched(RUN)
        assert (code, seen["state"], seen["steps"]) == (0, "training", 100_000)
        assert seen["step"] >= 30
        assert seen["seconds_left"] > 0
        assert seen["newest"]["tokens_per_second"] > 0
        assert seen["checkpoints"]["newest"].startswith("step_")

        config = (RUN / "config.toml").read_bytes()
        refused = overland(*WORDS, "training.steps=40", cwd=tmp_path, code=2, NGPU="2",
                           LOG_RANK="0")  # fmt: skip
        assert refused.stdout == ""
        said = [line for line in refused.stderr.splitlines() if "in use" in line]
        assert len(set(said)) == 1, refused.stderr  # the launcher may end the rank that is later
        assert said[0].startswith(f"{RUN} is in use by process ")
        assert f"`touch {RUN}/STOP`" in said[0]
        assert "Traceback" not in refused.stderr
        assert (RUN / "config.toml").read_bytes() == config
        # One in a rank's log would be taken for the end of the first run's rank.
        assert not list((RUN / "logs").glob("rank_*.log"))
        assert first.poll() is None
    finally:
        interrupt(first, signal.SIGKILL)
    assert (RUN / "owner.json").exists()
    code, seen = watched(RUN)
    assert (code, seen["state"]) == (3, "silent")

    stop = "checkpoint.stop_after_minutes=0.01"
    again = overland(*WORDS, stop, cwd=tmp_path, code=75, NGPU="1")
    assert "resumed" in again.stdout
    assert not [name for name in os.listdir(RUN) if "owner" in name]
    code, seen = watched(RUN)
    assert (code, seen["state"]) == (1, "stopped")
    assert seen["checkpoints"]["newest"].endswith(".preempt")
