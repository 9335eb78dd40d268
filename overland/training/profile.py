"""Traces of what the devices did, one file per rank, for Perfetto."""

from __future__ import annotations

import os
import pickle
import warnings
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from overland.training.callbacks import Callback

if TYPE_CHECKING:
    from overland.training.run import Run

SNAPSHOT_ENTRIES = 100_000


class Profiler(Callback):
    def __init__(self, run: Run) -> None:
        settings = run.config.profiling
        idle = settings.profile_freq - settings.profiler_warmup - settings.profiler_active
        quieten()
        activities = [ProfilerActivity.CPU]
        if run.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.run = run
        self.profiler = profile(
            activities=activities,
            schedule=schedule(
                wait=idle, warmup=settings.profiler_warmup, active=settings.profiler_active
            ),
            on_trace_ready=self._write,
        )
        self.snapshots = settings.enable_memory_snapshot and run.device.type == "cuda"

    def on_start(self, run: Run) -> None:
        if self.snapshots:
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
        self.profiler.start()

    def on_step(self, run: Run) -> None:
        self.profiler.step()

    def on_end(self, run: Run) -> None:
        self.profiler.stop()

    def _write(self, profiler: profile) -> None:
        name = f"step_{self.run.progress.step}_rank_{self.run.world.rank}"
        self.run.folder.traces.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.run.folder.traces / f"{name}.json.gz"))
        if self.snapshots:
            self.run.folder.memory_snapshots.mkdir(parents=True, exist_ok=True)
            path = self.run.folder.memory_snapshots / f"{name}.pickle"
            path.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))


def quieten() -> None:
    """Keeps off the console what the profiler says at each start and end of a trace: lines of its
    library (only the levels above 5 leave `USDT: profiler_start` out), and that a trace holds the
    events of its own steps, which is what is wanted."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    warnings.filterwarnings("ignore", "Warning: Profiler clears events")
