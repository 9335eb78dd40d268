"""What a checkpoint costs a training loop on one GPU, beside PyTorch's own DCP in the same run:

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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[2]))

import overland.checkpoint.write as writing
from overland.checkpoint.checksum import BLOCK
from overland.checkpoint.folder import delete, latest_checkpoint, list_checkpoints
from overland.checkpoint.read import open_checkpoint
from overland.checkpoint.store import Outcome, Store
from overland.cluster.world import World
from overland.config.schema import Checkpoint as Settings
from overland.config.schema import Comm, JobConfig
from overland.parallel.comm import process_group
from overland.training.loop import open_data
from overland.training.run import Run, build_run
from overland.training.state import load_tensors, run_facts, run_tensors, saved_state
from overland.training.step import train_step

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


def job(flavor: str, rows: int, accumulate: int, folder: Path) -> JobConfig:
    return JobConfig.model_validate(
        {
            "job": {"dump_folder": str(folder)},
            "model": {"name": "llama3", "flavor": flavor},
            "training": {
                "dataset": "random",
                "seq_len": 8192,
                "local_batch_size": rows,
                "global_batch_size": rows * accumulate,
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

    def step(self) -> float:
        started = time.monotonic()
        train_step(self.run, next(self.data))
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


def ours(
    loop: Loop, folder: Path, mode: str = "async", saves: int = 1
) -> tuple[Outcome, float, float]:
    store = Store(folder, Settings.model_validate({"async_mode": mode, "keep_latest_k": 1}),
                  loop.run.device)  # fmt: skip
    loop.run.store = store
    store.prepare(saved_state(loop.run))
    if store.is_async:
        store._snapshot._making.join()  # type: ignore[union-attr]
    say("  memory is ready")

    def save() -> None:
        run = loop.run
        store.save(run.progress.step, saved_state(run), run_facts(run))

    def busy() -> bool:
        return store._writing is not None and store._writing.is_alive()

    for _ in range(saves):
        for earlier in list_checkpoints(folder):  # the disk has room for one
            delete(earlier.path, store.disk)
        first, total = loop.stall(save, busy)
        (outcome,) = store.finish()
        assert not outcome.error, outcome.error
        say(f"  stall {first:.3f} s, of it {outcome.waited:.3f} s in the call; until the commit "
            f"{total:.3f} s; written in {outcome.seconds:.1f} s")  # fmt: skip
    return outcome, first, total


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
    with loop.run.optimizer.masters.whole():
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
        with loop.run.optimizer.masters.whole(), open_checkpoint(path) as checkpoint:
            load_tensors(loop.run, checkpoint, skip_optimizer=False)

    return timed(work)


def their_load(loop: Loop, folder: Path) -> float:
    forget_cache(folder)
    with loop.run.optimizer.masters.whole():
        state = run_tensors(loop.run)
        return timed(lambda: dcp.load(dict(state), checkpoint_id=folder))


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flavor", default="3B")
    parser.add_argument("--peer-flavor", default="1B")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("checkpoint-benchmark"))
    parser.add_argument("--only", default="disk,stall,peers")
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
    shutil.rmtree(args.folder, ignore_errors=True)


def stalls(args: argparse.Namespace, device: torch.device) -> None:
    """The large model: ours alone, since two copies of its state do not fit on the disk."""
    for accumulate in (1, 4):
        folder = args.folder / "ours"
        loop = Loop(job(args.flavor, args.rows, accumulate, args.folder / "run"), device)
        loop.warm_up()
        outcome, first, total = ours(loop, folder, saves=2)
        speed = outcome.num_bytes / GB / outcome.seconds
        say(f"{args.flavor}, {outcome.num_bytes / GB:.1f} GB, accumulation {accumulate}: stall "
            f"{first:.3f} s (all steps until the commit {total:.3f} s), background "
            f"{outcome.seconds:.1f} s = {speed:.2f} GB/s")  # fmt: skip
        if accumulate == 1:
            seconds = our_load(loop, folder)
            say(f"  load {seconds:.1f} s = {outcome.num_bytes / GB / seconds:.2f} GB/s")
        loop.close()
        del loop
        free()
        shutil.rmtree(folder, ignore_errors=True)


def peers(args: argparse.Namespace, device: torch.device) -> None:
    flavor = args.peer_flavor
    loop = Loop(job(flavor, args.rows, 1, args.folder / "run"), device)
    loop.warm_up()
    folder = args.folder / "ours"
    for mode in ("async", "disabled"):
        outcome, first, total = ours(loop, folder, mode)
        say(f"{flavor}, {outcome.num_bytes / GB:.1f} GB, ours {mode}: stall {first:.3f} s (all "
            f"{total:.3f} s), written in {outcome.seconds:.1f} s")  # fmt: skip
        loop.run.store.close()
    say(f"  load {our_load(loop, folder):.1f} s")
    with without_checksums():
        outcome, first, total = ours(loop, args.folder / "plain")
        say(f"  without checksums: written in {outcome.seconds:.1f} s")
        loop.run.store.close()
    outcome, first, total = ours(loop, args.folder / "plain")
    say(f"  with checksums again: written in {outcome.seconds:.1f} s")
    loop.run.store.close()
    shutil.rmtree(args.folder / "plain", ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    for kind in ("sync", "async"):
        first, total, seconds = peer(loop, args.folder / "dcp", kind)
        say(f"{flavor}, DCP {kind}: stall {first:.3f} s (all {total:.3f} s), written in "
            f"{seconds:.1f} s")  # fmt: skip
    say(f"  load {their_load(loop, args.folder / 'dcp'):.1f} s")
    loop.close()


if __name__ == "__main__":
    main()
