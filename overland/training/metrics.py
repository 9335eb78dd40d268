"""Measures speed and memory between two logs, and writes the metrics to files and services."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection
from contextlib import suppress
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overland.errors import TrainingError
from overland.files import replaced
from overland.training.callbacks import Callback, Record
from overland.training.plot import plot_losses
from overland.world.devices import device_name, memory_in_use, peak_flops
from overland.world.heartbeat import Heartbeat, Phase

if TYPE_CHECKING:
    from overland.training.run import Run

LONGEST_LINE = 2**16
STEP = re.compile(rb'\{"step": (\d+)')
USES = {
    "start": (Phase.STARTING, Phase.JOINING, Phase.BUILDING, Phase.LOADING),
    "data": (Phase.DATA,),
    "compute": (Phase.COMPUTING, Phase.REPORTING),
    "validation": (Phase.VALIDATING,),
    "save": (Phase.SAVING,),
    "end": (Phase.ENDING,),
}
ADDED = ("time", "seconds")  # to a record, in the file only
IN_LOOP = ("data", "compute", "validation", "save")


class Meter:
    """Measures speed and memory since the last reading; rates are per device."""

    def __init__(self, run: Run) -> None:
        training = run.config.training
        self.num_devices = run.world.size
        known = peak_flops(device_name(training.device), training.mixed_precision_param)
        self.peak = run.config.metrics.peak_flops or known
        self.measure = run.measure
        self.restart(run)

    def restart(self, run: Run) -> None:
        self._since = time.perf_counter()
        self._tokens = run.progress.tokens
        self._waited = 0.0

    def waited(self, seconds: float) -> None:
        """Adds time that the loop spent waiting for data."""
        self._waited += seconds

    def read(self, run: Run) -> Record:
        seconds = max(time.perf_counter() - self._since, 1e-9)
        rate = (run.progress.tokens - self._tokens) / seconds / self.num_devices
        flops = self.measure.flops
        record: Record = {
            f"{self.measure.unit}_per_second": rate,
            "tflops": flops and rate * flops / 1e12,
            "mfu": rate * flops / self.peak if self.peak and flops else None,
            "memory_gib": memory_in_use(run.config.training.device),
            "data_wait": self._waited / seconds,
        }
        self.restart(run)
        return record


class MetricsFile(Callback):
    """Appends one JSON object per logged step to metrics.jsonl.

    A resumed run continues the same file. Lines that an earlier session logged after the resumed
    step, or that a rewind undoes, are moved to metrics.undone.jsonl.

    A failed write never ends the run: lines that do not fit on a full disk are kept and written
    later.
    """

    def __init__(self, run: Run) -> None:
        self.late: list[bytes] = []
        self.begun = 0
        """Bytes of the first late line that are already in the file."""
        self._open(run)

    def _open(self, run: Run) -> None:
        drop_torn_line(run.folder.metrics)
        undo_lines(run.folder.metrics, run.folder.undone_metrics, run.progress.step)
        # Unbuffered, to know how many bytes were written.
        self.file: RawIOBase = run.folder.metrics.open("ab", buffering=0)

    def on_log(self, run: Run, record: Record) -> None:
        # For `overland watch`, and for reports of where the time went.
        seconds = seconds_by_use(run.beat, IN_LOOP)
        timed = {**record, "time": round(time.time(), 3), "seconds": seconds}
        is_first = not self.late
        self.late.append(json.dumps(timed).encode() + b"\n")
        problem = self._write()
        if problem and is_first:
            words = f"{run.folder.metrics} cannot be written: {problem}; the run continues, and "
            run.call("on_message", words + "its lines will be written later")

    on_validation = on_log

    def on_rewind(self, run: Run) -> None:
        self.file.close()
        self.late = [line for line in self.late if _step_of(line) <= run.progress.step]
        self.begun = 0  # an incomplete line is dropped from the file
        self._open(run)
        self._write()

    def on_end(self, run: Run) -> None:
        if self.late and (problem := self._write()):
            words = f"{run.folder.metrics} is missing its last {len(self.late):,} lines: {problem}"
            run.call("on_message", words)
        self.file.close()

    def _write(self) -> str | None:
        """Writes what is late; returns what prevents that."""
        try:
            while self.late:
                self.begun += self.file.write(self.late[0][self.begun :]) or 0
                if self.begun == len(self.late[0]):
                    del self.late[0]
                    self.begun = 0
        except OSError as error:
            return error.strerror
        return None


def seconds_by_use(beat: Heartbeat, uses: Collection[str] = tuple(USES)) -> dict[str, float]:
    """Returns how this session's time has been spent so far. The device computes asynchronously;
    the host waits for it when it reads a loss."""
    return {use: round(beat.seconds_in(*USES[use]), 3) for use in uses}


def drop_torn_line(path: Path) -> None:
    """Drops an incomplete line at the end, left by a session that was killed or ran out of disk."""
    with path.open("ab+") as file:
        size = file.tell()
        file.seek(max(0, size - LONGEST_LINE))
        tail = file.read()
        if not tail.endswith(b"\n"):
            file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)


def undo_lines(path: Path, undone: Path, step: int) -> None:
    """Moves the lines of steps after `step` to the end of `undone`. The rest becomes a new file, so
    that programs that follow the old one notice."""
    with path.open("rb") as lines:
        if all(_step_of(line) <= step for line in lines):
            return
        lines.seek(0)
        with replaced(path) as valid, undone.open("ab") as void:
            for line in lines:
                (valid if _step_of(line) <= step else void).write(line)


def newest_records(path: Path) -> list[Record]:
    """Returns the last record of a step and the last record of a validation, if there are any, and
    all records from the first of these steps on, as they were logged."""
    newest: dict[bytes, int] = {}
    with path.open("rb") as lines:
        for line in lines:
            kind = b"validation_loss" if b'"validation_loss' in line else b"loss"
            newest[kind] = _step_of(line)
        first = min(newest.values(), default=0)
        lines.seek(0)
        records = []
        for line in lines:
            with suppress(ValueError):  # cut short by a full disk
                records += [json.loads(line)] if _step_of(line) >= first else []
    some = [one for one in records if isinstance(one, dict) and isinstance(one.get("step"), int)]
    return [{key: one[key] for key in one if key not in ADDED} for one in some]


def was_undone_after(path: Path, step: int) -> bool:
    """Whether steps after this one were logged and then undone."""
    with suppress(FileNotFoundError), path.open("rb") as lines:
        return any(_step_of(line) > step for line in lines)
    return False


def _step_of(line: bytes) -> int:
    found = STEP.match(line)  # parsing a million lines as JSON would take too long
    return int(found[1]) if found else 0


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


class LossPlot(Callback):
    """Draws the loss from metrics.jsonl, at every checkpoint and at the end."""

    def on_save(self, run: Run, path: object) -> None:
        """Draws the plot, or reports why it could not: a failed plot never ends the run."""
        try:
            plot_losses(run.folder.metrics, run.folder.plot, run.config.job.description)
        except OSError as error:
            run.call("on_message", f"{run.folder.plot} was not drawn: {error.strerror}")

    def on_end(self, run: Run) -> None:
        self.on_save(run, None)


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
