"""What sessions.jsonl says about a run's sessions, and metrics.jsonl about where their time
went."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from overland.apps.proofs.pool import RankPool
from overland.training.build import build_run
from overland.training.callbacks import Callback
from overland.training.loop import train
from overland.training.run import Run
from overland.world import World
from overland.world.heartbeat import Heartbeat, Phase
from tests.jobs import tiny_job


class Fails(Callback):
    def __init__(self, run: Run, step: int) -> None:
        self.step = step

    def on_step(self, run: Run) -> None:
        if run.progress.step == self.step:
            raise RuntimeError("a device fell off")


def three_sessions(world: World, folder: Path) -> None:
    """One that fails, one that is stopped, one that finishes."""
    config = tiny_job(
        folder, checkpoint={"enable": True, "interval": 2, "async_mode": "disabled"},
        validation={"enable": True, "dataset": "random", "freq": 2, "steps": 1},
    )  # fmt: skip
    for fails_at, stops in ((4, False), (0, True), (0, False)):
        run = build_run(config, world, torch.device("cpu"), log_ranks=())
        run.callbacks.append(Fails(run, fails_at))
        if stops:
            (folder / "STOP").touch()
        try:
            train(run)
        except RuntimeError:
            assert fails_at


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Path:
    path = tmp_path_factory.mktemp("run")
    ranks.run(1, three_sessions, path)
    return path


def test_each_session_tells_where_it_began_and_how_it_ended(folder: Path) -> None:
    events = read(folder / "sessions.jsonl")
    starts = [one for one in events if one["event"] == "start"]
    ends = [one for one in events if one["event"] == "end"]
    assert [one["step"] for one in starts] == [0, 2, 3]
    assert [one["how"] for one in ends] == ["failed", "stopped", "finished"]
    assert ends[0]["what"] == "a device fell off"
    assert [one["step"] for one in ends] == [4, 3, 6]
    assert [one["saved"] for one in events if one["event"] == "save"] == [2, 3, 4, 6]
    for start, end in zip(starts, ends, strict=True):
        assert start["begun"] <= start["time"] <= end["time"]
        assert (start["devices"], start["rows"], start["steps"]) == (1, 8, 6)
        assert start["precision"]["computation"] == "float64"
        assert start["software"]["torch"] == torch.__version__
    assert any("STOP" in one.get("what", "") for one in events if one["event"] == "message")


def test_the_time_of_a_session_is_that_of_its_uses(folder: Path) -> None:
    events = read(folder / "sessions.jsonl")
    start = [one for one in events if one["event"] == "start"][-1]
    end = events[-1]
    lived = end["time"] - start["begun"]
    assert sum(end["seconds"].values()) == pytest.approx(lived, abs=0.05 + 0.01 * lived)
    lines = [one for one in read(folder / "metrics.jsonl") if one["time"] >= start["time"]]
    assert lines
    for earlier, later in itertools.pairwise(lines):
        for use, seconds in earlier["seconds"].items():
            assert later["seconds"][use] >= seconds
    for use, seconds in lines[-1]["seconds"].items():
        assert 0 <= seconds <= end["seconds"][use] + 1e-3
    assert lines[-1]["seconds"]["compute"] > 0
    assert lines[-1]["seconds"]["validation"] > 0


def test_a_heartbeat_counts_the_time_of_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("overland.world.heartbeat.time.monotonic", lambda: now[0])
    monkeypatch.setattr("overland.world.heartbeat.age_of_process", lambda: 3.0)
    beat = Heartbeat()
    for phase, seconds in ((Phase.DATA, 1.0), (Phase.COMPUTING, 5.0), (Phase.DATA, 2.0)):
        beat.enter(phase)
        now[0] += seconds
    assert beat.seconds_in(Phase.STARTING) == 3.0
    assert beat.seconds_in(Phase.DATA) == 3.0, "with the one that it is in"
    assert beat.seconds_in(Phase.COMPUTING, Phase.DATA) == 8.0
    assert beat.seconds_in(Phase.SAVING) == 0.0
