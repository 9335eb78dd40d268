"""Batch scripts, and what judges them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from overland.cluster.job import BatchJob, JobRequest, RunPlace, plan_job
from overland.cluster.site import load_site

# What each site leaves to the user.
LEFT_OPEN = {
    "frontier": {"account": "abc123"},
    "s3df": {"account": "fac:repo", "partition": "ada", "time": "04:00:00"},
    "perlmutter": {"account": "m1234", "qos": "regular", "time": "04:00:00"},
    "generic-nvidia": {"devices_per_node": 4, "time": "04:00:00"},
    "generic-amd": {"devices_per_node": 8, "time": "04:00:00"},
    "generic-cpu": {"time": "04:00:00"},
    "laptop": {"devices_per_node": 2},
}


def place(run: Path, workdir: Path | None = None, python: str = "/env/bin/python") -> RunPlace:
    return RunPlace(
        run=run,
        workdir=workdir or run,
        config=run / "submit" / "1.toml",
        done=run / "done",
        stopped=run / "stopped",
        logs=run / "logs",
        python=python,
        steps=100,
        margin_minutes=3.0,
    )


def make_job(site: str, where: RunPlace, **wanted: object) -> BatchJob:
    return plan_job(load_site(site), JobRequest(**{**LEFT_OPEN[site], **wanted}), where)  # type: ignore[arg-type]


def assert_good_bash(text: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    if shutil.which("shellcheck"):
        checked = subprocess.run(
            ["shellcheck", "--shell=bash", "-"], input=text, capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stdout
