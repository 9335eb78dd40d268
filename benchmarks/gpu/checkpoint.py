"""What a checkpoint costs a training loop on one GPU, compared with PyTorch's DCP in the same run:

    python benchmarks/gpu/checkpoint.py [--flavor 3B] [--rows 2] [--peer-flavor 1B] [--folder /disk]

Stall: how much longer the steps take that run while a save is going on, the save call included.
Background: from the call to the commit. Disk: the same number of threads writing plain zeros.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[2]))

import overland.checkpoint.write as writing
from overland.checkpoint.folder import delete, latest_checkpoint, list_checkpoints
from overland.checkpoint.format import BLOCK
from overland.checkpoint.read import open_checkpoint
from overland.checkpoint.snapshot import Snapshot
from overland.checkpoint.store import Outcome, Store
from overland.config.schema import Checkpoint as Settings
from overland.config.schema import Comm, JobConfig
from overland.data.batch import Batch
from overland.parallel.comm import process_group
from overland.training.build import build_run
from overland.training.loop import open_data
from overland.training.resume import load_tensors
from overland.training.run import Run
from overland.training.state import run_facts, run_tensors, saved_state
from overland.training.step import train_step
from overland.world import World

GB = 1e9


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


STARTED = time.monotonic()


def disk_speed(
    folder: Path, gigabytes: float, num_files: int, num_threads: int, direct: bool = False
) -> float:
    """GB/s of plain writes, synced, as a program that only writes would do it."""
    blocks = int(gigabytes * GB / BLOCK / num_files)
    data = memoryview(mmap.mmap(-1, BLOCK))  # on a page's boundary, as direct writes need
    data[:] = os.urandom(2**20) * (BLOCK // 2**20)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
    paths = [folder / f"raw_{i}" for i in range(num_files)]
    files = [os.open(path, flags) for path in paths]
    jobs = iter([(file, n * BLOCK) for n in range(blocks) for file in files])
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                job = next(jobs, None)
            if job is None:
                return
            os.pwrite(job[0], data, job[1])

    started = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for file in files:
        os.fsync(file)
        os.close(file)
    seconds = time.monotonic() - started
    for path in paths:
        path.unlink()
    return blocks * num_files * BLOCK / GB / seconds


def job(flavor: str, rows: int, folder: Path) -> JobConfig:
    return JobConfig.model_validate(
        {
            "job": {"dump_folder": str(folder)},
            "model": {"name": "llama3", "flavor": flavor},
            "training": {
                "dataset": "random",
                "seq_len": 8192,
                "local_batch_size": rows,
                "steps": 10_000,
            },
            "compile": {"enable": True},
            "optimizer": {"lr": 1e-4},
            "metrics": {"enable_tensorboard": False},
            "checkpoint": {"enable": False},
        }
    )


class Loop:
    """Steps of a run, timed one by one."""

    def __init__(self, config: JobConfig, device: torch.device) -> None:
        self.run: Run = build_run(config, World(), device, log_ranks=())
        self.data = open_data(self.run)
        self.step_seconds: float = 0.0
        self.passes = 1

    def step(self) -> float:
        started = time.monotonic()
        some = [next(self.data) for _ in range(self.passes)]
        batch = Batch({name: torch.cat([one[name] for one in some]) for name in some[0].fields})
        train_step(self.run, batch)
        self.run.progress.step += 1
        torch.cuda.synchronize()
        return time.monotonic() - started

    def warm_up(self, count: int = 6) -> None:
        times = [self.step() for _ in range(count)]
        self.step_seconds = statistics.median(times[-3:])
        say(f"step {self.step_seconds:.3f} s, {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB")

    def stall(self, save: Callable[[], None], busy: Callable[[], bool]) -> tuple[float, float]:
        """(what the next step lost with the call, what all steps until the end of the save did)."""
        started = time.monotonic()
        save()
        self.step()
        first = time.monotonic() - started - self.step_seconds
        count = 1
        while busy():
            self.step()
            count += 1
        return first, time.monotonic() - started - count * self.step_seconds

    def close(self) -> None:
        self.data.close()
        self.run.store.close()


def prepare(loop: Loop, folder: Path, mode: str = "async") -> Store:
    loop.run.store.close()
    settings = Settings.model_validate({"async_mode": mode, "keep_latest_k": 1})
    loop.run.store = store = Store(folder, settings, loop.run.device)
    store.prepare(saved_state(loop.run))
    if isinstance(store._snapshot, Snapshot):
        store._snapshot._locking.join()
    say("memory is ready")
    return store


def ours(loop: Loop, what: str) -> Outcome:
    run, store = loop.run, loop.run.store
    for earlier in list_checkpoints(store.folder):  # the disk has room for one
        delete(earlier.path, store.disk)

    def save() -> None:
        store.save(run.progress.step, saved_state(run), run_facts(run))

    first, total = loop.stall(save, lambda: bool(store._writing and store._writing.is_alive()))
    (outcome,) = store.finish()
    assert not outcome.error, outcome.error
    size = outcome.num_bytes / GB
    say(f"{what}, {size:.1f} GB: stall {first:.3f} s, of it {outcome.waited:.3f} s in the call; "
        f"all steps until the commit {total:.3f} s; written in {outcome.seconds:.1f} s = "
        f"{size / outcome.seconds:.2f} GB/s")  # fmt: skip
    return outcome


@contextmanager
def without_checksums() -> Iterator[None]:
    kept, writing.checksum = writing.checksum, lambda data: 0  # type: ignore[attr-defined]
    try:
        yield
    finally:
        writing.checksum = kept  # type: ignore[attr-defined]


def peer(loop: Loop, folder: Path, kind: str) -> tuple[float, float, float]:
    """(stall of a step, of all, seconds to the end) of dcp.save or dcp.async_save."""
    shutil.rmtree(folder, ignore_errors=True)
    state: dict[str, Any] = {}
    future: list[Any] = []
    started = time.monotonic()
    with loop.run.optimizer.whole():
        state = {name: tensor.clone() for name, tensor in run_tensors(loop.run).items()}
    started = time.monotonic()

    def save() -> None:
        if kind == "sync":
            dcp.save(state, checkpoint_id=folder)
        else:
            future.append(dcp.async_save(state, checkpoint_id=folder))

    first, total = loop.stall(save, lambda: bool(future) and not future[0].done())
    return first, total, time.monotonic() - started


def timed(work: Callable[[], Any]) -> float:
    started = time.monotonic()
    work()
    torch.cuda.synchronize()
    return time.monotonic() - started


def forget_cache(folder: Path) -> None:
    """So that a load reads the disk, and not memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def our_load(loop: Loop, folder: Path) -> float:
    path = latest_checkpoint(folder)
    assert path is not None
    forget_cache(folder)

    def work() -> None:
        with loop.run.optimizer.whole(), open_checkpoint(path) as checkpoint:
            load_tensors(loop.run, checkpoint, skip_optimizer=False)

    return timed(work)


def their_load(loop: Loop, folder: Path) -> float:
    forget_cache(folder)
    with loop.run.optimizer.whole():
        state = run_tensors(loop.run)
        return timed(lambda: dcp.load(dict(state), checkpoint_id=folder))


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()


def stalls(args: argparse.Namespace, device: torch.device) -> None:
    """The large model: ours alone, since two copies of its state do not fit on the disk."""
    folder = args.folder / "ours"
    loop = Loop(job(args.flavor, args.rows, args.folder / "run"), device)
    loop.warm_up()
    prepare(loop, folder)
    ours(loop, f"{args.flavor}, 1 pass a step")
    with without_checksums():
        ours(loop, f"{args.flavor}, 1 pass a step, without checksums")
    loop.passes = 4
    loop.warm_up(3)
    ours(loop, f"{args.flavor}, 4 passes a step")
    outcome = ours(loop, f"{args.flavor}, 4 passes a step")
    seconds = our_load(loop, folder)
    say(f"load {seconds:.1f} s = {outcome.num_bytes / GB / seconds:.2f} GB/s")
    loop.close()
    del loop
    free()
    shutil.rmtree(folder, ignore_errors=True)


def peers(args: argparse.Namespace, device: torch.device) -> None:
    flavor, folder = args.peer_flavor, args.folder / "ours"
    loop = Loop(job(flavor, args.rows, args.folder / "run"), device)
    loop.warm_up()
    for mode in ("disabled", "async"):
        prepare(loop, folder, mode)
        ours(loop, f"{flavor}, {mode}")
    with without_checksums():
        ours(loop, f"{flavor}, async, without checksums")
    ours(loop, f"{flavor}, async")
    say(f"load {our_load(loop, folder):.1f} s")
    loop.run.store.close()
    shutil.rmtree(folder, ignore_errors=True)
    for kind in ("sync", "async"):
        first, total, seconds = peer(loop, args.folder / "dcp", kind)
        say(f"{flavor}, DCP {kind}: stall {first:.3f} s; all steps until the end {total:.3f} s; "
            f"written in {seconds:.1f} s")  # fmt: skip
    say(f"load {their_load(loop, args.folder / 'dcp'):.1f} s")
    loop.close()


def checksums(args: argparse.Namespace, device: torch.device) -> None:
    """Saves with checksums and without, in turn, while nothing trains."""
    folder = args.folder / "ours"
    loop = Loop(job(args.peer_flavor, args.rows, args.folder / "run"), device)
    for parameter in loop.run.optimizer.parameters:  # a disk may know how to write zeros
        for tensor in loop.run.optimizer.state(parameter).values():
            tensor.normal_()
    prepare(loop, folder, "disabled")
    seconds: dict[str, list[float]] = {"first": [], "with": [], "without": []}
    for kind in ["first", *["with", "without"] * args.pairs]:
        with without_checksums() if kind == "without" else nullcontext():
            seconds[kind].append(save(loop).seconds)
        say(f"{kind}: {seconds[kind][-1]:.2f} s")
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    say(f"medians {medians}: checksums cost {medians['with'] / medians['without'] - 1:.1%}")
    loop.close()


def save(loop: Loop) -> Outcome:
    run, store = loop.run, loop.run.store
    for earlier in list_checkpoints(store.folder):
        delete(earlier.path, store.disk)
    run.progress.step += 1
    store.save(run.progress.step, saved_state(run), run_facts(run))
    (outcome,) = store.finish()
    assert not outcome.error, outcome.error
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flavor", default="3B")
    parser.add_argument("--peer-flavor", default="1B")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("checkpoint-benchmark"))
    parser.add_argument("--only", default="disk,stall,peers,checksums")
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    say(f"torch {torch.__version__}, {os.cpu_count()} cores, {shutil.disk_usage(args.folder)}")

    if "disk" in args.only:
        for gigabytes, num_files, num_threads, direct in (
            (6, 1, 1, False),
            (24, 4, 8, False),
            (24, 4, 8, True),
        ):
            speed = disk_speed(args.folder, gigabytes, num_files, num_threads, direct)
            say(f"disk: {gigabytes} GB into {num_files} files by {num_threads} threads"
                f"{', past the page cache' if direct else ''}: {speed:.2f} GB/s")  # fmt: skip
    with process_group(Comm(), World(), "cuda") as device:
        if "stall" in args.only:
            stalls(args, device)
        if "peers" in args.only:
            peers(args, device)
        if "checksums" in args.only:
            checksums(args, device)
    shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
