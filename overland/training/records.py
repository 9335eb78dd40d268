"""What the first rank writes into the run folder, next to checkpoints and the ledger:
metrics.jsonl, with speed, MFU and memory, the sessions, and a description of the run."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import overland
from overland.checkpoint.folder import step_of
from overland.checkpoint.store import Outcome
from overland.config.schema import JobConfig, Training
from overland.config.write import write_config
from overland.data.corpus import Corpus
from overland.data.prepare import corpora_of
from overland.data.sft import end_of_turn
from overland.data.tokenizer import UNKNOWN, Tokenizer
from overland.data.tokenizer_files import GENERATION, companions_in
from overland.errors import sentence
from overland.files import append, replace_file, replaced
from overland.models.flops import count_parameters
from overland.plugins import plugin
from overland.run_folder import MODEL_CONFIG
from overland.training.callbacks import Callback, Record
from overland.training.run import Run
from overland.world.devices import device_name, memory_in_use, num_devices, peak_flops
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
LONGEST_MESSAGE = 2000
DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")


class Meter:
    """Measures speed and memory since the last reading; rates are per device."""

    def __init__(self, run: Run) -> None:
        training = run.config.training
        self.num_devices = devices_of(run)
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


class Lines:
    """Appends lines of JSON to a file. A failed write never ends the run: lines that do not fit on
    a full disk are kept and written later."""

    def __init__(self, path: Path) -> None:
        self.path, self.late = path, list[bytes]()

    def add(self, record: Mapping[str, Any]) -> str:
        """Appends a line; returns what prevents that, or an empty string."""
        self.late.append(json.dumps(record).encode() + b"\n")
        return self.write()

    def write(self) -> str:
        """Writes what is late, each line as a whole; returns what prevents that."""
        try:
            while self.late:
                append(self.path, self.late[0])
                del self.late[0]
        except OSError as error:
            return str(error.strerror)
        return ""


class MetricsFile(Callback):
    """Appends one JSON object per logged step to metrics.jsonl.

    A resumed run continues the same file. Lines that an earlier session logged after the resumed
    step, or that a rewind undoes, are moved to metrics.undone.jsonl.
    """

    def __init__(self, run: Run) -> None:
        self.lines = Lines(run.folder.metrics)
        drop_torn_line(run.folder.metrics)
        self._undo(run)

    def _undo(self, run: Run) -> None:
        undo_lines(run.folder.metrics, run.folder.undone_metrics, run.progress.step)

    def on_log(self, run: Run, record: Record) -> None:
        # For `overland watch`, and for reports of where the time went.
        seconds = seconds_by_use(run.beat, IN_LOOP)
        is_first = not self.lines.late
        problem = self.lines.add({**record, "time": round(time.time(), 3), "seconds": seconds})
        if problem and is_first:
            words = f"{run.folder.metrics} cannot be written: {problem}; the run continues, and "
            run.say(words + "its lines will be written later")

    on_validation = on_log

    def on_rewind(self, run: Run) -> None:
        late = self.lines.late
        late[:] = [line for line in late if step_of_line(line) <= run.progress.step]
        self._undo(run)
        self.lines.write()

    def on_end(self, run: Run) -> None:
        if problem := self.lines.write():
            missing = len(self.lines.late)
            run.say(f"{run.folder.metrics} is missing its last {missing:,} lines: {problem}")


class SessionFile(Callback):
    """Appends a line to sessions.jsonl for each event of a session: its hardware and software, its
    saves and messages, and how it ended. A session that was killed has no end event."""

    def __init__(self, run: Run) -> None:
        self._lines = Lines(run.folder.sessions)
        self._step = run.progress.step
        with suppress(OSError):
            drop_torn_line(run.folder.sessions)
        self._begun = time.time() - sum(seconds_by_use(run.beat).values())

    def on_start(self, run: Run) -> None:
        world, degrees = run.world, asdict(run.mesh.degrees)
        self._write(
            run,
            "start",
            begun=round(self._begun, 3),
            steps=run.config.training.steps,
            batch=run.progress.batch,
            job=os.environ.get("SLURM_JOB_ID", ""),
            machine=socket.gethostname(),
            nodes=world.num_nodes,
            devices=devices_of(run),
            ranks=world.size,
            device=device_name(run.config.training.device),
            degrees={name: degrees[name] for name in DEGREES if name in degrees},
            parameters=count_parameters(run.model_config).total,
            rows=run.global_batch_size,
            unit=run.measure.unit,
            precision=precision_of(run.config.training),
            software=software(),
            seconds=seconds_by_use(run.beat),
        )

    def on_save(self, run: Run, saved: Outcome) -> None:
        facts = {"seconds": round(saved.seconds, 3), "waited": round(saved.waited, 3)}
        saved_step = step_of(saved.path)
        self._write(run, "save", saved=saved_step, bytes=saved.num_bytes, **facts)

    def on_step(self, run: Run) -> None:
        self._step = run.progress.step

    def on_rewind(self, run: Run) -> None:
        self._write(run, "rewind", batch=run.progress.batch, undone=self._step - run.progress.step)

    def on_message(self, run: Run, message: str) -> None:
        self._write(run, "message", what=message[:LONGEST_MESSAGE])

    def on_end(self, run: Run) -> None:
        error = sys.exc_info()[1]  # the error that is leaving the loop, if any
        is_over = run.progress.step >= run.config.training.steps
        how = "failed" if error is not None else "finished" if is_over else "stopped"
        what = ""
        if error is not None:
            what = sentence(error) if isinstance(error, Exception) else type(error).__name__
            what = what or type(error).__name__
        self._write(
            run, "end", how=how, what=what[:LONGEST_MESSAGE], seconds=seconds_by_use(run.beat)
        )

    def _write(self, run: Run, event: str, **facts: Any) -> None:
        line = {"time": round(time.time(), 3), "event": event, "step": run.progress.step, **facts}
        self._lines.add(line)


def describe_run(run: Run, asked: JobConfig) -> None:
    """Writes what a run folder says about its run: config, README, tokenizer, and the model's
    config.json. `asked`: the config that the run was started with."""
    # These apply once: they must not apply again when this config resumes the run.
    once: dict[str, Any] = {"resume": "auto", "skip_optimizer": False, "allow_changes": []}
    config = asked.having({f"checkpoint.{key}": value for key, value in once.items()})
    write_config(config, run.folder.config, full=True)
    plugin("console").write_readme(run)
    if hasattr(run.model_config, "to_hf"):
        text = json.dumps(run.model_config.to_hf(), indent=2)
        replace_file(run.folder.root / MODEL_CONFIG, text + "\n")
    if run.dataset.tokenizer is not None:
        keep_tokenizer(run.dataset.tokenizer, run.folder.tokenizer, run.config)


def keep_tokenizer(tokenizer: Tokenizer, folder: Path, config: JobConfig) -> None:
    """Copies the tokenizer into the run folder, with the chat template used in training."""
    folder.mkdir(exist_ok=True)
    if tokenizer.path.parent.resolve() == folder.resolve():
        return  # a resumed run opened the copy
    # A model's generation config lies next to its tokenizer, and is copied with it.
    beside = {file.name: file.read_bytes() for file in companions_in(tokenizer.path.parent)}
    files = {**beside, **tokenizer.files()}
    if config.sft.shape != "off" and (end := end_of_turn(config, tokenizer)) is not None:
        about = json.loads(files.get(GENERATION, b"{}"))
        ends = [end] if tokenizer.eos_id is None else [tokenizer.eos_id, end]
        known = about.get("eos_token_id") or []
        known = known if isinstance(known, list) else [known]
        about["eos_token_id"] = list(dict.fromkeys([*known, *ends]))
        files[GENERATION] = json.dumps(about, indent=2).encode()
    for name, data in files.items():
        replace_file(folder / name, data)


def write_plan(run: Run) -> None:
    """Writes the data plan and the paths of its corpora for `overland prove data`, and the number
    of steps for `overland watch`."""
    folder = run.folder.data
    folder.mkdir(exist_ok=True)
    places = corpora_of(run.folder.root)
    for name, corpus in run.dataset.rows.corpora.items():
        if isinstance(corpus, Corpus):
            places[name] = str(corpus.folder.absolute())
    tokenizer = run.dataset.tokenizer
    plan = {
        "fingerprint": run.dataset.plan.fingerprint,
        "plan": run.dataset.plan.to_json(),
        "steps": run.config.training.steps,
        **({"holdout": run.config.data.holdout} if run.config.data.holdout else {}),
        **(tokenizer.policy if tokenizer is not None else UNKNOWN)._asdict(),
    }
    replace_file(run.folder.plan, json.dumps({**plan, "corpora": places}, indent=1) + "\n")


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


def devices_of(run: Run) -> int:
    """Returns the number of devices of a run: fewer than its ranks if they share them."""
    shared = run.config.comm.ranks_per_device
    return num_devices(run.world.size, run.config.training.device, shared)


def precision_of(training: Training) -> dict[str, str]:
    """Returns the number formats, once "auto" is resolved."""
    return {
        "parameters": training.dtype,
        "computation": training.mixed_precision_param,
        "gradient sums": training.mixed_precision_reduce,
    }


def software() -> dict[str, str]:
    """Returns the software versions that a run's results may depend on."""
    found = {
        "overland": overland.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if hip := getattr(torch.version, "hip", None):
        found["rocm"] = hip
    return found
