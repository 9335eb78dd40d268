"""The `overland` command as a user runs it: in its own process."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from tests.cli.warm import Command
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
# Where the built-in corpus and its tokenizer are built, once for all commands of a test process.
DATA = tempfile.mkdtemp(prefix="overland-test-data-")
atexit.register(shutil.rmtree, DATA, ignore_errors=True)

TINY = [
    f"data.folder={DATA}",
    "model.overrides={hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, "
    "num_attention_heads = 4, num_key_value_heads = 2, vocab_size = 512}",
    "data.vocab_size=512",
    "training.seq_len=32",
    "training.local_batch_size=2",
    "metrics.log_freq=1",
]


def environment(**changes: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "CONFIG_FILE")}
    return {**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}


def overland(*words: str, cwd: Path, code: int = 0, **env: str) -> Command:
    """Runs `overland WORDS`, or `python WORDS` if the first is a script, and asserts on its exit
    code."""
    done = Command(words, cwd, environment(**env))
    assert done.wait() == code, f"exit {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done


def start_overland(*words: str, cwd: Path, **env: str) -> Command:
    """Starts `overland WORDS` in a process group of its own, as a terminal would."""
    return Command(words, cwd, environment(**env), merged=True)


def wait_for_step(metrics: Path, step: int) -> None:
    wait_until(
        lambda: metrics.exists() and any(one["step"] >= step for one in read_metrics(metrics)),
        f"{metrics} gets to step {step}",
    )


def interrupt(process: Command, number: int = signal.SIGINT) -> tuple[int, str]:
    """Signals the whole process group, as Ctrl-C does; returns exit code and output."""
    os.killpg(process.pid, number)
    return process.wait(), process.stdout


def read_metrics(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def losses(path: Path) -> dict[int, float]:
    """Loss by step; the later line counts."""
    return {r["step"]: r["loss"] for r in read_metrics(path) if "loss" in r}
