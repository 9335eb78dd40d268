"""Run folders written by hand."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

NOW = time.time()


def line(step: int, time: float | None = None, **more: Any) -> str:
    record = {
        "step": step, "loss": 10.0 / (1 + step), "grad_norm": 1.0, "lr": 1e-3,
        "tokens": 1000 * step, "tokens_per_second": 5000.0, "tflops": 1.0, "mfu": 0.41,
        "memory_gib": 12.5, "data_wait": 0.0, "skipped_steps": 0, "skipped_documents": 0, **more,
    }  # fmt: skip
    return json.dumps(record if time is None else {**record, "time": time}) + "\n"


def make_run(folder: Path, steps: int = 1000, done: int = 0, pace: float = 2.0) -> Path:
    """At step `done` now, a line per step at this pace."""
    folder.mkdir(parents=True, exist_ok=True)
    text = f'[job]\ndescription = "A tiny run"\n[training]\nsteps = {steps}\n'
    (folder / "config.toml").write_text(text)
    if done:
        lines = [line(step, NOW - pace * (done - step)) for step in range(1, done + 1)]
        (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def add_events(folder: Path, *events: dict[str, Any]) -> None:
    with (folder / "attempts.jsonl").open("a") as file:
        for event in events:
            file.write(json.dumps({"time": NOW, "job": "7", **event}) + "\n")


def set_live(folder: Path, **facts: Any) -> None:
    live = {
        "time": NOW, "job": "7", "attempt": 1, "state": "training", "step": 50, "phase": "step",
        "ranks": 16, "nodes": ["n1", "n2"], "step_seconds": 2.0, "slowest": None, "late": [],
    }  # fmt: skip
    (folder / "live.json").write_text(json.dumps({**live, **facts}))


def add_checkpoint(folder: Path, name: str, committed: bool = True) -> None:
    path = folder / "checkpoint" / name
    path.mkdir(parents=True)
    if committed:
        (path / "COMMITTED").write_text("{}")


SESSION = {"event": "session", "restart": 0, "nodes": ["n1", "n2", "n3"], "wanted": 2, "ends": None}
ATTEMPT = {"event": "attempt", "attempt": 1, "nodes": ["n1", "n2"], "from_step": 0}
FAULT = {
    "event": "fault", "attempt": 1, "kind": "node lost", "what": "n2 does not answer",
    "ranks": [8], "nodes": ["n2"], "step": 42, "action": "restart", "excluded": ["n2"],
    "seconds_to_notice": 12.0,
}  # fmt: skip
RECOVERED = {
    "event": "recovered", "attempt": 2, "kind": "node lost", "lost_seconds": 95.0, "step": 43,
}  # fmt: skip
