"""Measures speed and memory between two logs, and writes the metrics to metrics.jsonl."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection
from io import RawIOBase
from pathlib import Path

from overland.files import replaced
from overland.training.callbacks import Callback, Record
from overland.training.run import Run
from overland.world.devices import device_name, memory_in_use, peak_flops
from overland.world.heartbeat import Heartbeat, Phase

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
        self.late = [line for line in self.late if step_of_line(line) <= run.progress.step]
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
        if all(step_of_line(line) <= step for line in lines):
            return
        lines.seek(0)
        with replaced(path) as valid, undone.open("ab") as void:
            for line in lines:
                (valid if step_of_line(line) <= step else void).write(line)


def step_of_line(line: bytes) -> int:
    found = STEP.match(line)  # parsing a million lines as JSON would take too long
    return int(found[1]) if found else 0
