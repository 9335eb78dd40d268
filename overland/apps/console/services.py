"""Logs metrics to TensorBoard and to Weights & Biases, and decides what happens to logged points
that a resumed or rewound run undoes."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from overland.errors import TrainingError
from overland.training.callbacks import Callback, Record
from overland.training.records import ADDED, step_of_line
from overland.training.run import Run


class TensorBoard(Callback):
    """Writes TensorBoard events, and keeps what does not fit on a full disk for later. After such a
    failure the writer is unusable, and a new one starts a new file: so it is retried only at
    checkpoints and at the end, not at every log."""

    def __init__(self, run: Run) -> None:
        self.late: list[Record] = []
        self._open(run)

    def _open(self, run: Run) -> None:
        """Discards what was logged after this step, for both of TensorBoard's readers: the Python
        reader honors `purge_step`, and the fast one drops data when a step is repeated. If nothing
        has to be discarded, nothing is repeated."""
        step = run.progress.step
        is_undone = was_undone_after(run.folder.undone_metrics, step)
        again = newest_records(run.folder.metrics) if is_undone else []
        first = min((record["step"] for record in again), default=step + 1)
        self.writer = self._new_writer(run, purge_step=first)
        for record in again:
            self.on_log(run, record)

    def _new_writer(self, run: Run, **options: Any) -> Any:
        from torch.utils.tensorboard.writer import SummaryWriter

        return SummaryWriter(str(run.folder.tb), **options)

    def on_log(self, run: Run, record: Record) -> None:
        self.late.append(record)
        if self.writer is not None and (problem := self._write(run)):
            words = f"{run.folder.tb} cannot be written: {problem}; the run continues, and "
            run.call("on_message", words + "its metrics will be written later")

    on_validation = on_log

    def on_save(self, run: Run, path: object) -> None:
        self._write(run)

    def on_rewind(self, run: Run) -> None:
        self._close()
        self.late = [one for one in self.late if one["step"] <= run.progress.step]
        self._open(run)

    def on_end(self, run: Run) -> None:
        if self.late and (problem := self._write(run)):
            words = f"{run.folder.tb} is missing its last {len(self.late):,} logs: {problem}"
            run.call("on_message", words)
        self._close()

    def _write(self, run: Run) -> str | None:
        """Writes what is late; returns what prevents that."""
        try:
            if self.writer is None:
                self.writer = self._new_writer(run)
            for record in self.late:
                for name, value in _numbers(record).items():
                    self.writer.add_scalar(name, value, record["step"])
            self.writer.flush()  # raises the errors of the writer thread
            self.late = []
        except OSError as error:
            self._close()
            return error.strerror or str(error)
        return None

    def _close(self) -> None:
        with suppress(OSError):
            if self.writer is not None:
                self.writer.close()
        self.writer = None


class WeightsAndBiases(Callback):
    """Logs to W&B. It cannot undo a logged point, so each continuation from an earlier step becomes
    a new W&B run. All runs of a run folder form a group, and each records the step it continues
    from."""

    def __init__(self, run: Run) -> None:
        self.run = self._start(run)

    def _start(self, run: Run) -> Any:
        import wandb

        name, step = run.folder.root.name, run.progress.step
        try:
            return wandb.init(
                project="overland",
                group=name,
                name=f"{name}, from step {step}" if step else name,
                dir=str(run.folder.root),
                config={**run.config.model_dump(), "resumed_step": step},
            )
        except wandb.errors.Error as error:
            raise TrainingError(
                f"Weights & Biases failed to start: {error}; run `wandb login`, set "
                f"WANDB_MODE=offline, or turn metrics.enable_wandb off"
            ) from None

    def on_log(self, run: Run, record: Record) -> None:
        self.run.log(_numbers(record), step=record["step"])

    on_validation = on_log

    def on_rewind(self, run: Run) -> None:
        self.run.finish()
        self.run = self._start(run)

    def on_end(self, run: Run) -> None:
        self.run.finish()


def _numbers(record: Record) -> dict[str, Any]:
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, int | float) and name != "step"
    }


def newest_records(path: Path) -> list[Record]:
    """Returns the last record of a step and the last record of a validation, if there are any, and
    all records from the first of these steps on, as they were logged."""
    newest: dict[bytes, int] = {}
    with path.open("rb") as lines:
        for line in lines:
            kind = b"validation_loss" if b'"validation_loss' in line else b"loss"
            newest[kind] = step_of_line(line)
        first = min(newest.values(), default=0)
        lines.seek(0)
        records = []
        for line in lines:
            with suppress(ValueError):  # cut short by a full disk
                records += [json.loads(line)] if step_of_line(line) >= first else []
    some = [one for one in records if isinstance(one, dict) and isinstance(one.get("step"), int)]
    return [{key: one[key] for key in one if key not in ADDED} for one in some]


def was_undone_after(path: Path, step: int) -> bool:
    """Whether steps after this one were logged and then undone."""
    with suppress(FileNotFoundError), path.open("rb") as lines:
        return any(step_of_line(line) > step for line in lines)
    return False
