"""What the trainer itself costs on the host, without a model: `python benchmarks/overhead.py`.

Start-up: `overland --help`, and the imports of a run. Loop: Python's time per step for everything
but forward, backward and update (reading ahead, counting, callbacks, stop requests, bookkeeping),
with a model that does nothing. On a GPU this time is hidden unless it is longer than the step.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import overland.training.loop as loop
from overland.config.schema import JobConfig
from overland.parallel.comm import process_group
from overland.training.build import build_run
from overland.training.run import Run
from overland.training.step import StepResult
from overland.world import World

STEPS = 2000


def seconds_of(*words: str, repeats: int = 5) -> float:
    """The median run of a command, after one that warms the disk cache."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def milliseconds_per_step() -> float:
    nothing, no = torch.zeros(()), torch.zeros((), dtype=torch.bool)
    result = StepResult(nothing, nothing, no, no, num_units=16, metrics=torch.zeros(0))

    def no_step(run: Run, *args: Any) -> StepResult:
        return result

    loop.train_step = no_step  # type: ignore[assignment]
    with (
        tempfile.TemporaryDirectory() as folder,
        process_group(JobConfig().comm, World(), "cpu") as device,
    ):
        settings: dict[str, dict[str, Any]] = {
            "job": {"dump_folder": folder},
            "training": {
                "dataset": "random",
                "seq_len": 16,
                "local_batch_size": 1,
                "steps": STEPS,
                "mixed_precision_param": "float32",
            },
            "checkpoint": {"enable": False},
        }
        run = build_run(JobConfig.model_validate(settings), World(), device, log_ranks=())
        started = time.perf_counter()
        loop.train(run)
        return (time.perf_counter() - started) / STEPS * 1e3


def main() -> None:
    print(f"python -c pass: {seconds_of('-c', 'pass'):.2f} s")
    print(f"overland --help: {seconds_of('-m', 'overland', '--help'):.2f} s")
    print(f"import torch: {seconds_of('-c', 'import torch', repeats=3):.2f} s")
    run = "import overland.training.build"
    print(f"imports of a run: {seconds_of('-c', run, repeats=3):.2f} s")
    print(f"loop: {milliseconds_per_step():.3f} ms per step, logging every 10th")


if __name__ == "__main__":
    main()
