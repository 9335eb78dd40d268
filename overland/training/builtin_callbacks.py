"""Small callbacks that runs have by themselves: garbage collection, timeouts, the pace of a device,
the profiler."""

from __future__ import annotations

import gc
import os
import pickle
import time
import warnings
from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from overland.parallel.comm import set_timeout
from overland.training.callbacks import Callback, Record
from overland.words import any_of, counted_words

if TYPE_CHECKING:
    from overland.training.run import Run

PROBE_SIZE = {"cpu": 256, "cuda": 4096}  # on an H100 0.2 ms per product, on a CPU core about 1 ms
NUM_PRODUCTS = 3
NUM_READINGS = 3  # the best counts: a neighbour may be in the way for a moment
MEMORY_EVENTS = 100_000


class GarbageCollection(Callback):
    """Runs Python's garbage collector at the same step everywhere: a collection on one rank makes
    all others wait."""

    def on_start(self, run: Run) -> None:
        gc.disable()
        gc.collect()
        gc.freeze()  # what lives now lives to the end: never look at it again

    def on_step(self, run: Run) -> None:
        if run.progress.step % run.config.training.gc_freq == 0:
            gc.collect(1)

    def on_end(self, run: Run) -> None:
        gc.unfreeze()
        gc.enable()


class Timeouts(Callback):
    """Lets collectives take long until the first step is done (compilation, connections), and not
    later."""

    def __init__(self, run: Run) -> None:
        self.is_set = False

    def on_step(self, run: Run) -> None:
        if not self.is_set:
            set_timeout(run.mesh, run.config.comm.train_timeout_seconds)
            self.is_set = True


class Pace(Callback):
    """Measures how fast this rank's device is by itself. Ranks wait for one another within every
    step, so that all steps last as long as the slowest rank's; a few products that need no other
    rank show who that is."""

    def __init__(self, run: Run) -> None:
        size = PROBE_SIZE.get(run.device.type, 1024)
        # A CPU without bfloat16 instructions took 230 times as long in it as in float32.
        dtype = torch.bfloat16 if run.device.type == "cuda" else torch.float32
        self.matrix = torch.ones(size, size, device=run.device, dtype=dtype)
        self.product = torch.empty_like(self.matrix)

    def on_log(self, run: Run, record: Record) -> None:
        """Times the device, which is idle now: the loss has just been read."""
        run.beat.probe_seconds = min(self._time() for _ in range(NUM_READINGS))
        run.beat.data_wait = record["data_wait"]

    def _time(self) -> float:
        self._wait()
        started = time.perf_counter()
        for _ in range(NUM_PRODUCTS):
            torch.mm(self.matrix, self.matrix, out=self.product)
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.matrix.is_cuda:
            torch.cuda.synchronize()


class LeftOut(Callback):
    """Says how many documents were left out or cut because a key asks for it, whenever that has
    grown."""

    def __init__(self, run: Run) -> None:
        self.said: Counter[str] = Counter()

    def on_log(self, run: Run, record: Record) -> None:
        counts = run.dataset.counts
        if counts != self.said:
            self.said = counts
            words = any_of(counted_words(counts), "and")
            run.call("on_message", f"of the conversations read so far, {words} (sft.too_long, "
                     "sft.skip_unlearned)")  # fmt: skip


class Profiler(Callback):
    """Writes traces of what the devices did, one file per rank, for Perfetto."""

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
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
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
