"""A recorded run: the folder of a real one, as it was in the middle of its third session. The
pictures of README and docs are drawn from it, so the same code draws the same pictures.

python -m tests.reporting.recorded    records it again
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from overland.run_folder import CHECKPOINTS, COMMITTED, METRICS, PLAN, SESSIONS
from tests.cli.processes import start_overland, wait_for_step
from tests.reporting.real_run import train_and_kill

RECORDED = Path(__file__).with_name("recorded")
STEPS, SEEN_AT = 360, 340
KEPT = ("*.json", "*.jsonl", "*.toml", "data")


def record() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_and_kill(folder, STEPS)
        process = start_overland("train", "run.toml", cwd=folder, NGPU="1")
        wait_for_step(folder / "run" / METRICS, SEEN_AT)
        shutil.rmtree(RECORDED, ignore_errors=True)
        RECORDED.mkdir()
        for path in (path for kept in KEPT for path in (folder / "run").glob(kept)):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, RECORDED / path.name)
        assert process.wait() == 0
        plan = RECORDED / PLAN
        plan.write_text(plan.read_text().replace(f"{folder}/", ""))


@contextmanager
def recorded_run(name: str = "tiny-llama") -> Iterator[Path]:
    """Gives the run's folder, below the current one, at the moment when it was recorded."""
    with tempfile.TemporaryDirectory() as folder:
        before, zone = Path.cwd(), os.environ.get("TZ")
        run = Path(folder) / name
        shutil.copytree(RECORDED, run)
        events = [json.loads(line) for line in (run / SESSIONS).read_text().splitlines()]
        for event in events:
            if event["event"] == "save":
                marker = run / CHECKPOINTS / f"step_{event['saved']}" / COMMITTED
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.touch()
                os.utime(marker, (event["time"], event["time"]))
        lines = (run / METRICS).read_text().splitlines()
        now = json.loads(lines[-1])["time"] + 0.5
        os.environ["TZ"] = "UTC"
        time.tzset()
        os.chdir(folder)
        try:
            with (
                mock.patch("time.time", return_value=now),
                mock.patch("overland.apps.watch.status.owner_lives", return_value=True),
            ):
                yield Path(name)
        finally:
            os.chdir(before)
            os.environ.pop("TZ") if zone is None else os.environ.__setitem__("TZ", zone)
            time.tzset()


if __name__ == "__main__":
    record()
