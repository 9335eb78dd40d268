"""Our checkpoints compared with PyTorch's DCP, on this machine's CPU and disk:

    python benchmarks/checkpoint.py [--gigabytes 2] [--rounds 3] [--plan-ranks 1024]

Every round saves and loads the same tensors both ways, one after the other; medians are compared.
The plan is that of one process pretending to be many ranks, as rank 0 makes it once per run.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[1]))

import overland.checkpoint.write as writing
from overland.checkpoint.plan import Box, check_whole, drop_copies, lay_out_files
from overland.checkpoint.read import fill, open_checkpoint
from overland.checkpoint.store import Store
from overland.checkpoint.write import WrittenFile, build_index
from overland.config.schema import Checkpoint as Settings
from overland.models.flavors import FLAVORS

TENSOR = 16 * 2**20  # elements of each, in float32


def load(path: Path, state: dict[str, torch.Tensor]) -> None:
    with open_checkpoint(path) as checkpoint:
        fill(checkpoint, state)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plan-ranks", type=int, default=1024)
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        compare(Path(folder), args.gigabytes, args.rounds)
    plan(args.plan_ranks)
    dist.destroy_process_group()


def compare(root: Path, gigabytes: float, rounds: int) -> None:
    count = max(1, int(gigabytes * 1e9 / TENSOR / 4))
    state = {f"tensor.{i}": torch.randn(TENSOR // 4096, 4096) for i in range(count)}
    seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def clock(name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        seconds[name].append(time.monotonic() - started)

    stores = {
        mode: Store(root / mode, Settings.model_validate({"async_mode": mode, "keep_latest_k": 1}))
        for mode in ("disabled", "async")
    }
    for store in stores.values():
        store.prepare(state)
    theirs = root / "dcp"
    for number in range(1, rounds + 1):
        for mode, store in stores.items():
            with clock(f"ours, {mode}: written"):
                with clock(f"ours, {mode}: the loop waits"):
                    store.save(number, state, {})
                (outcome,) = store.finish()
            assert not outcome.error, outcome.error
        with without_checksums(), clock("ours, disabled, no checksums: written"):
            stores["disabled"].save(number + rounds, state, {})
        stores["disabled"].finish()
        shutil.rmtree(root / "disabled")
        shutil.rmtree(theirs, ignore_errors=True)
        with clock("DCP sync: written"):
            dcp.save(dict(state), checkpoint_id=theirs)
        shutil.rmtree(theirs)
        with clock("DCP async: written"):
            with clock("DCP async: the loop waits"):
                future = dcp.async_save(dict(state), checkpoint_id=theirs)
            future.result()  # type: ignore[union-attr]
        for name, read in (
            ("ours: load", partial(load, root / "async" / f"step_{number}")),
            ("DCP: load", partial(dcp.load, checkpoint_id=theirs)),
        ):
            target = {key: torch.empty_like(tensor) for key, tensor in state.items()}
            forget(root)
            with clock(name):
                read(target)
            assert all(torch.equal(state[key], target[key]) for key in state)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    size = count * TENSOR * 4 / 1e9
    print(f"{size:.1f} GB, medians of {rounds} rounds, {os.cpu_count()} cores\n")
    for name, value in medians.items():
        print(f"{name:<44}{value:8.2f} s")
    print()
    for what, ours, other in (
        ("async: the loop waits", "ours, async: the loop waits", "DCP async: the loop waits"),
        ("async: written", "ours, async: written", "DCP async: written"),
        ("sync: written", "ours, disabled: written", "DCP sync: written"),
        ("load, verified", "ours: load", "DCP: load"),
        ("checksums", "ours, disabled: written", "ours, disabled, no checksums: written"),
    ):
        print(f"{what:<24}{medians[ours] / medians[other]:6.2f} × {other}")


@contextmanager
def without_checksums() -> Iterator[None]:
    kept, writing.checksum = writing.checksum, lambda data: 0  # type: ignore[attr-defined]
    try:
        yield
    finally:
        writing.checksum = kept  # type: ignore[attr-defined]


def forget(folder: Path) -> None:
    """So that a load reads the disk, and not memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def plan(num_ranks: int) -> None:
    """Llama 3 8B with Adam, sharded over all ranks: plan, index and its size."""
    shapes = FLAVORS["llama3"]["8B"].parameter_shapes()
    names = [
        (f"{prefix}{name}{suffix}", shape)
        for name, shape in shapes.items()
        for prefix, suffix in (("model.", ""), ("optimizer.", ".exp_avg"),
                               ("optimizer.", ".exp_avg_sq"))
    ]  # fmt: skip
    boxes_of_ranks = []
    for rank in range(num_ranks):
        boxes = []
        for name, shape in names:
            rows = -(-shape[0] // num_ranks)
            start = min(rank * rows, shape[0])
            size = (min(rows, shape[0] - start), *shape[1:])
            if size[0]:
                corner = (start, *[0] * (len(shape) - 1))
                boxes.append(Box(name, torch.float32, shape, corner, size))
        boxes_of_ranks.append(boxes)
    started = time.monotonic()
    sent = len(pickle.dumps(boxes_of_ranks[0]))
    dropped = drop_copies(boxes_of_ranks)
    assert not any(dropped)
    check_whole(boxes_of_ranks)
    files = [lay_out_files(boxes, rank) for rank, boxes in enumerate(boxes_of_ranks)]
    planning = time.monotonic() - started
    written = [[WrittenFile(0, 0, [[0]] * len(file.boxes)) for file in some] for some in files]
    started = time.monotonic()
    text = build_index("shard", files, written, {}).to_json()
    print(
        f"\n8B on {num_ranks} ranks: rank 0 plans in {planning:.1f} s, once per run, from "
        f"{sent / 1e3:.0f} kB of each; index of {len(text) / 1e6:.0f} MB made in "
        f"{time.monotonic() - started:.1f} s, in the background of every save"
    )


if __name__ == "__main__":
    main()
