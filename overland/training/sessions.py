"""The sessions of a run, in sessions.jsonl: the hardware and software of each, its saves and
messages, and how it ended. A session that was killed has no end event.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from io import RawIOBase
from typing import Any

import torch

import overland
from overland.checkpoint.folder import step_of
from overland.checkpoint.store import Outcome
from overland.config.schema import Training
from overland.errors import sentence
from overland.models.flops import count_parameters
from overland.training.callbacks import Callback
from overland.training.metrics import drop_torn_line, seconds_by_use
from overland.training.run import Run
from overland.world.devices import device_name

LONGEST_MESSAGE = 2000


class SessionFile(Callback):
    """Appends a line for each event of a session. A failed write never ends the run: lines that do
    not fit on a full disk are written later."""

    def __init__(self, run: Run) -> None:
        self._late: list[bytes] = []
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
            devices=world.size,
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
        self._late.append(json.dumps(line).encode() + b"\n")
        with suppress(OSError), run.folder.sessions.open("ab", buffering=0) as file:
            while self._late:
                _append(file, self._late[0])
                del self._late[0]


DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")


def _append(file: RawIOBase, line: bytes) -> None:
    """Appends the whole line or nothing."""
    size = file.tell()
    if (file.write(line) or 0) < len(line):
        file.truncate(size)
        raise OSError


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
