"""Checks that a run starts without a network: runs `overland check` with connections refused."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from overland.cluster.doctor.finding import Finding, failure, ok
from overland.processes import PYTHON
from overland.words import command

DEFAULT = "quickstart"
SECONDS = 600


def check_offline_start(config: str | None, env: Mapping[str, str]) -> Iterator[Finding]:
    words = ["check", config or DEFAULT, "--json"]
    with tempfile.TemporaryDirectory() as place:
        record = Path(place) / "tried"
        program = [*PYTHON, "-m", "overland.cluster.doctor.no_network", str(record), *words]
        try:
            done = subprocess.run(
                program, env=dict(env), capture_output=True, text=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            yield failure("start", f"did not finish in {SECONDS} s", command("overland", *words))
            return
        tried = record.read_text().split("\n")[:-1] if record.is_file() else []
    yield from judge_start(config, done, list(dict.fromkeys(tried)))


def judge_start(
    config: str | None, done: subprocess.CompletedProcess[str], tried: list[str]
) -> Iterator[Finding]:
    what = "start without network"
    shown = f"`{command('overland', 'check', config or DEFAULT)}`"
    described = done.returncode == 0 or done.stdout.startswith("{")  # even if files are missing
    if tried:
        way = "find the cause: your own module, a callback, or a package that calls home"
        yield failure(what, f"{shown} tried to reach {', '.join(tried)}", way)
    elif not described:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        # Our own errors are useful sentences; of a traceback, only the last line is.
        told = "; ".join(lines) if done.returncode == 2 else lines[-1]
        yield failure(what, f"{shown} fails: {told}", f"{shown} says more")
    else:
        yield ok(what, f"{shown} passed without trying to connect")
    if config is not None and described:
        missing = json.loads(done.stdout)["to_fetch"]
        if missing:
            yield failure(
                "files of the config",
                "; ".join(missing),
                "get them with `overland fetch`, or correct their paths",
            )
        else:
            yield ok("files of the config", "all present")
