"""Callbacks for everything optional, so that the loop stays simple: the small built-in ones and the
registry of your own; their hooks are in run.py.

A callback overrides the hooks it needs. Every rank has its own instance and calls it at the same
point; a callback that only some ranks need has a factory that returns None on the others. A user's
module (`job.custom_import`) adds its own with `register_callback`.

The small built-in ones are below: garbage collection, timeouts, device speed, notices of skipped
conversations, the profiler, the cache of compiled code. Others are in records.py and, if
they only show the run, in apps/console.
"""

from __future__ import annotations

import gc
import os
import pickle
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from overland.arguments import refused
from overland.checkpoint.plan import broadcast
from overland.files import replace_file
from overland.parallel.comm import set_timeout
from overland.training.run import Callback, Record, Run
from overland.words import any_of, counted_words, number_of

Factory = Callable[[Run], Callback | None]

PROBE_SIZE = {"cpu": 256, "cuda": 4096}  # on an H100 0.2 ms per product, on a CPU core about 1 ms
NUM_PRODUCTS = 3
NUM_READINGS = 3  # the best one counts: another process may interfere briefly
MEMORY_EVENTS = 100_000

_factories: list[Factory] = []


def register_callback(factory: Factory) -> Factory:
    """Adds a callback to every run; usable as a decorator on the callback's class or a function."""
    is_other_class = isinstance(factory, type) and not issubclass(factory, Callback)
    if is_other_class or not callable(factory):
        expected = "a subclass of overland.Callback, or a function that takes a run and returns one"
        raise refused("register_callback: factory", factory, expected)
    _factories.append(factory)
    return factory


def user_callbacks(run: Run) -> list[Callback]:
    made = [callback for factory in _factories if (callback := factory(run)) is not None]
    for callback in made:
        if not isinstance(callback, Callback):
            raise refused("a registered callback", callback, "an overland.Callback, or None")
    return made


class GarbageCollection(Callback):
    """Runs Python's garbage collector at the same step on all ranks, since a collection on one rank
    makes all others wait."""

    def on_start(self, run: Run) -> None:
        gc.disable()
        gc.collect()
        gc.freeze()  # what is alive now lives to the end, so never scan it again

    def on_step(self, run: Run) -> None:
        if run.progress.step % run.config.training.gc_freq == 0:
            gc.collect(1)

    def on_end(self, run: Run) -> None:
        gc.unfreeze()
        gc.enable()


class Timeouts(Callback):
    """Allows collectives a long time until the first step is done (compilation, connections), and
    `comm.train_timeout_seconds` afterwards."""

    def __init__(self, run: Run) -> None:
        self.is_set = False

    def on_step(self, run: Run) -> None:
        if not self.is_set:
            set_timeout(run.mesh, run.config.comm.train_timeout_seconds)
            self.is_set = True


class DeviceSpeed(Callback):
    """Measures how fast this rank's device is on its own. Ranks wait for one another within every
    step, so all of them take as long as the slowest; a few matrix products that need no other rank
    show which one that is."""

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


class SkippedDocuments(Callback):
    """Reports how many documents were skipped because they are empty or bad, or skipped or
    truncated because the config asks for it, whenever a number has grown."""

    def __init__(self, run: Run) -> None:
        self.skipped, self.counts = 0, Counter[str]()

    def on_log(self, run: Run, record: Record) -> None:
        skipped, counts = run.dataset.num_skipped, run.dataset.counts
        if skipped != self.skipped:
            self.skipped = skipped
            documents = number_of(skipped, "empty or unreadable document")
            run.say(f"{documents} skipped so far")
        if counts != self.counts:
            self.counts = counts
            words = any_of(counted_words(counts), "and")
            run.say(f"of the conversations read so far, {words} (sft.too_long, sft.skip_unlearned)")


class Profiler(Callback):
    """Writes profiler traces, one file per rank, for Perfetto."""

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
    """Silences the profiler's messages at the start and end of each trace: log lines of its library
    (only levels above 5 omit `USDT: profiler_start`), and the warning that a trace holds only the
    events of its own steps, which is what we want."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    warnings.filterwarnings("ignore", "Warning: Profiler clears events")


class CompileCache(Callback):
    """Keeps the output of torch.compile in the run folder, so that the next session starts warm.

    torch.compile caches its output on the node, usually in /tmp, which clusters empty after each
    job. In the run folder there is one file per pipeline stage, written whole by the stage's first
    rank and read by one rank for all: no locks, and no thousands of small files that every rank
    requests from a parallel file system. Entries are found by a hash of code, shapes, device and
    version, so that several nodes, devices and versions can share a file, and stale entries do no
    harm. Our own kernels are not kept: Triton compiles them again in 3 s.
    """

    def __init__(self, run: Run) -> None:
        pp = run.mesh.degrees.pp
        self.stage = run.world.rank * pp // run.world.size  # each compiles its own code
        names = ["compiled.bin", *(f"compiled_{stage}.bin" for stage in range(1, pp))]
        self.paths = [run.folder.root / name for name in names]
        self.path = self.paths[self.stage]
        self.is_saved = run.world.rank % (run.world.size // pp) != 0

    def on_start(self, run: Run) -> None:
        read = [read_own(path) if run.world.is_first else b"" for path in self.paths]
        made = broadcast(read, run.store.group)[self.stage]
        if not made:
            return
        try:
            torch.compiler.load_cache_artifacts(made)
        # From another torch version, or incomplete; everything is compiled again.
        except Exception as error:
            run.say(f"{self.path} cannot be used: {error!r}")

    def on_step(self, run: Run) -> None:
        """Writes the file once, or reports why it could not: a full disk costs the next session
        some time, but must not end this one."""
        if self.is_saved:
            return
        self.is_saved = True
        made = torch.compiler.save_cache_artifacts()
        if made is None:
            return
        try:
            replace_file(self.path, made[0], durable=False)
        except OSError as error:
            run.say(f"{self.path} was not written: {error.strerror}")


def read_own(path: Path) -> bytes:
    """Reads a file of this user; returns empty bytes if it is missing or of another user."""
    try:
        return path.read_bytes() if path.stat().st_uid == os.getuid() else b""
    except OSError:
        return b""
