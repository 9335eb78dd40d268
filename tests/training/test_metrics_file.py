"""What was logged, after sessions that ended in the middle of a line or of an interval."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.summary.writer.record_writer import RecordWriter

from overland.apps.console.services import TensorBoard, newest_records
from overland.apps.proofs.pool import RankPool
from overland.apps.report.plot import LossPlot
from overland.apps.watch.history import History
from overland.config.schema import JobConfig
from overland.training.build import build_run
from overland.training.callbacks import Callback
from overland.training.loop import train
from overland.training.records import MetricsFile, drop_torn_line
from overland.training.run import Run
from overland.world import World
from overland.world.heartbeat import Heartbeat
from tests.jobs import tiny_job

WHOLE = b'{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("torn", [b"", b"{", b'{"step": 3, "loss": 2.0', b'{"st' + b"x" * 5000])
def test_a_torn_line_does_not_spoil_the_next(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE + torn)
    drop_torn_line(path)
    assert path.read_bytes() == WHOLE


def test_a_file_with_nothing_but_half_a_line_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step"')
    drop_torn_line(path)
    assert path.read_bytes() == b""


def test_a_new_file_is_begun(tmp_path: Path) -> None:
    drop_torn_line(tmp_path / "metrics.jsonl")
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


class Dies(Callback):
    """Ends the session silently after a step, as a kill does."""

    def __init__(self, run: Run, step: int) -> None:
        self.step = step

    def on_step(self, run: Run) -> None:
        if run.progress.step == self.step:
            raise KeyboardInterrupt


def session(world: World, config: JobConfig, dies_at: int = 0) -> None:
    run = build_run(config, world, torch.device("cpu"), log_ranks=())
    run.callbacks.append(Dies(run, dies_at))
    try:
        train(run)
    except KeyboardInterrupt:
        assert dies_at


def steps_in_tensorboard(folder: Path) -> dict[str, list[int]]:
    """As its fast reader sees them: a step that comes again voids all after it."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    seen: dict[str, list[int]] = {}
    for path in sorted(folder.glob("events.out.*")):
        for data in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(data)
            for value in event.summary.value:
                steps = seen.setdefault(value.tag, [])
                steps[:] = [step for step in steps if step < event.step] + [event.step]
    return seen


def test_what_was_logged_of_undone_steps_is_void_everywhere(
    ranks: RankPool, tmp_path: Path
) -> None:
    """The first session dies at step 8; the second resumes from step 4 and logs less often, so no
    step of the first is overwritten by one of the second."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def job(log_freq: int, validates: bool) -> JobConfig:
        return tiny_job(
            tmp_path,
            training={"steps": 12},
            metrics={"log_freq": log_freq, "enable_tensorboard": True},
            validation={"enable": validates, "dataset": "random", "freq": 3, "steps": 1},
            checkpoint={"enable": True, "interval": 4, "async_mode": "disabled"},
        )

    ranks.run(1, session, job(1, True), 8)
    ranks.run(1, session, job(12, False))
    valid = [1, 2, 3, 4, 12]
    history = History(tmp_path / "metrics.jsonl")
    history.read_on()
    assert [step for step, _ in history.losses] == valid
    assert [step for points in history.held_out.values() for step, _ in points] == [3]
    assert (tmp_path / "loss.svg").read_text().count("<circle") == len(valid) + 1
    undone = (tmp_path / "metrics.undone.jsonl").read_text()
    assert [f'"step": {step},' in undone for step in (4, 5, 6, 7, 8)] == [False] + [True] * 3 + [
        False
    ]
    for seen in (
        steps_in_tensorboard(tmp_path / "tb")["loss"],
        [e.step for e in EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("loss")],
    ):
        assert seen == valid


def test_a_resumed_run_repeats_no_point_and_logs_no_time(ranks: RankPool, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def job(steps: int) -> JobConfig:
        return tiny_job(
            tmp_path,
            training={"steps": steps},
            metrics={"log_freq": 1, "enable_tensorboard": True},
            validation={"enable": True, "dataset": "random", "freq": 2, "steps": 1},
            checkpoint={"enable": True, "interval": 2, "async_mode": "disabled"},
        )

    for steps in (3, 6):
        ranks.run(1, session, job(steps))
    loader = EventAccumulator(str(tmp_path / "tb"), purge_orphaned_data=False).Reload()
    assert [event.step for event in loader.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in loader.Scalars("validation_loss")] == [2, 3, 4, 6]
    assert not {"time", "seconds"} & {*loader.Tags()["scalars"]}


def test_no_run_ends_for_a_picture(tmp_path: Path) -> None:
    """As on a full disk, or where somebody removed the folder."""
    said: list[str] = []
    (tmp_path / "metrics.jsonl").write_bytes(WHOLE)
    folder = SimpleNamespace(metrics=tmp_path / "metrics.jsonl", plot=tmp_path / "gone" / "a.svg")
    config = SimpleNamespace(job=SimpleNamespace(description="a run"))
    run: Any = SimpleNamespace(
        folder=folder, config=config, call=lambda name, message: said.append(message)
    )
    LossPlot(run).on_save(run, None)
    assert said == [f"{folder.plot} was not drawn: No such file or directory"]


@pytest.mark.parametrize("kind", [MetricsFile, TensorBoard])
def test_a_full_disk_costs_neither_the_run_nor_its_numbers(
    tmp_path: Path, kind: type[MetricsFile] | type[TensorBoard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported once while it lasts; later logs write what is late."""
    said: list[str] = []
    (tmp_path / "metrics.jsonl").touch()
    folder = SimpleNamespace(metrics=tmp_path / "metrics.jsonl", tb=tmp_path / "tb")
    folder.undone_metrics = tmp_path / "undone.jsonl"
    run: Any = SimpleNamespace(
        folder=folder,
        progress=SimpleNamespace(step=0),
        beat=Heartbeat(),
        call=lambda name, message: said.append(message),
        say=said.append,
    )
    metrics = kind(run)
    metrics.on_log(run, {"step": 1, "loss": 1.0})

    def full(*words: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if isinstance(metrics, MetricsFile):
            metrics.lines.path = Path("/dev/full")
        else:
            patch.setattr(RecordWriter, "flush", full)
        for step in (2, 3):
            metrics.on_log(run, {"step": step, "loss": float(step)})
        assert len(said) == 1
        assert "cannot be written: No space left on device; the run continues" in said[0]
        metrics.on_end(run)
        assert "is missing its last 2 l" in said[1]
    if isinstance(metrics, MetricsFile):
        metrics.lines.path = folder.metrics
    metrics.on_log(run, {"step": 4, "loss": 4.0})
    metrics.on_end(run)
    assert len(said) == 2
    if isinstance(metrics, MetricsFile):
        lines = folder.metrics.read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    else:
        assert sorted(set(steps_in_tensorboard(folder.tb)["loss"])) == [1, 2, 3, 4]


def test_a_newest_line_without_a_step_is_not_logged_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "validation_loss/a": 2}\n{"step": 1e400, "loss": 2}\n')
    assert [record["step"] for record in newest_records(path)] == [1]
