"""Reads committed checkpoints in any layout: every byte is verified, tensors that are missing,
misshapen or unused are refused, and nothing that is read can run code.

Any box of a tensor can be read, whatever boxes it was written in. Each rank reads its own bytes;
the index, which all ranks need, is read by one of them (`open_checkpoint`).
"""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overland.checkpoint.format import (
    BLOCK,
    INDEX,
    Index,
    Part,
    TensorEntry,
    check_part,
    checksum,
    parse_marker,
)
from overland.checkpoint.lazy import Lazy
from overland.checkpoint.plan import broadcast, local_name
from overland.errors import CheckpointError, MismatchError
from overland.files import Moved, ignore
from overland.parallel.sharding import local_part, shard_of
from overland.run_folder import CHECKPOINT, COMMITTED
from overland.words import first_few

NUM_THREADS = max(2, min(8, os.cpu_count() or 2))
PIECE = 4 * BLOCK  # read by one thread at a time
READ_BYTES = 2**22  # between two signs of progress
Tensors = Mapping[str, Tensor]


class CheckpointReader:
    """A committed checkpoint, open for reading. Usable from several threads."""

    def __init__(self, path: Path, index: Index, about: Mapping[str, Any], moved: Moved) -> None:
        self.path, self.index, self.about, self._moved = path, index, about, moved
        self.tensors = index.tensors
        self.run = index.run
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, name: str) -> Tensor:
        """Reads a whole tensor."""
        entry = self._entry(name)
        return self.read_slice(name, (0,) * len(entry.shape), entry.shape)

    def read_slice(self, name: str, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=self._entry(name).dtype)
        for job in self.jobs(name, tensor, start):
            job()
        return tensor

    def jobs(self, name: str, target: Tensor, start: Sequence[int]) -> Iterator[Callable[[], None]]:
        """Yields jobs that together fill `target`, which begins at `start` in the tensor."""
        entry = self._entry(name)
        if not target.numel():
            return
        self.check_parts(name)
        covered = 0
        for part in entry.parts:
            bounds = zip(start, target.shape, part.start, part.shape, strict=True)
            common = [(max(a, b), min(a + n, b + m)) for a, n, b, m in bounds]
            if all(first < end for first, end in common):
                place = zip(common, start, strict=True)
                into = target[tuple(slice(first - a, end - a) for (first, end), a in place)]
                covered += into.numel()
                offsets = [first - b for (first, _), b in zip(common, part.start, strict=True)]
                yield from self._copies(name, entry, part, offsets, into)
        if covered != target.numel():  # our own index tiles every tensor; see plan.check_whole
            raise CheckpointError(f"{self.path} lacks a part of {name}")

    def _copies(
        self, name: str, entry: TensorEntry, part: Part, offsets: Sequence[int], target: Tensor
    ) -> Iterator[Callable[[], None]]:
        """Yields jobs that copy the box at `offsets` of a part. A contiguous box is copied piece by
        piece to use little memory; any other box is copied at once."""
        size = entry.dtype.itemsize
        box = tuple(target.shape)
        strides = [math.prod(part.shape[dim + 1 :]) for dim in range(len(part.shape))]
        first = sum(o * s for o, s in zip(offsets, strides, strict=True))
        last = first + sum((n - 1) * s for n, s in zip(box, strides, strict=True))
        begin, end = first * size, (last + 1) * size
        if end - begin == target.numel() * size and target.is_contiguous():
            flat = target.view(-1)
            while begin < end:
                upto = min(end, (begin // PIECE + 1) * PIECE)
                some = flat[begin // size - first : upto // size - first]
                yield lambda a=begin, b=upto, to=some: to.copy_(  # type: ignore[misc]
                    self.read_verified(name, part, a, b, to.device).view(entry.dtype),
                    non_blocking=True,
                )
                begin = upto
        else:

            def strided() -> None:
                flat = self.read_verified(name, part, begin, end, target.device).view(entry.dtype)
                target.copy_(flat.as_strided(box, strides), non_blocking=True)

            yield strided

    def read_verified(
        self, name: str, part: Part, begin: int, end: int, device: torch.device
    ) -> Tensor:
        """Reads bytes of a part for a device, and verifies the blocks that contain them."""
        first = begin // BLOCK * BLOCK
        upto = min(part_bytes(self.tensors[name], part), -(-end // BLOCK) * BLOCK)
        data = self.read_raw(part.file, part.offset + first, upto - first, device)
        view = memoryview(data.numpy().data)
        for block in range(first // BLOCK, -(-upto // BLOCK)):
            some = view[block * BLOCK - first : (block + 1) * BLOCK - first]
            if checksum(some) != part.checksums[block]:
                where = part.offset + block * BLOCK
                raise CheckpointError(
                    f"{self.path / part.file} is damaged: bytes {where} to {where + len(some)}, "
                    f"part of {name}, do not match their checksum"
                )
        return data[begin - first : end - first]

    def read_raw(
        self, file: str, offset: int, size: int, device: torch.device | None = None
    ) -> Tensor:
        """Reads bytes of a file without verifying them."""
        # Pinned memory comes from PyTorch's cache, which knows when a copy no longer needs it.
        pinned = device is not None and device.type == "cuda"
        data = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        view = memoryview(data.numpy().data)
        descriptor, path = self._descriptor(file), self.path / file
        while view:
            with _reading(path):
                count = os.preadv(descriptor, [view[:READ_BYTES]], offset)
            if count == 0:
                raise CheckpointError(f"{path} is damaged: it ends at byte {offset}")
            self._moved(count)
            view, offset = view[count:], offset + count
        return data

    def check_parts(self, name: str) -> None:
        entry = self._entry(name)
        try:
            for part in entry.parts:
                check_part(entry, part, self.index.files[part.file])
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{self.path / INDEX} has an invalid entry for {name}: {error}; the checkpoint was "
                "changed after it was written"
            ) from None

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no {name}") from None

    def _descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            path, num_bytes = self.path / file, self.index.files[file].num_bytes
            with _reading(path):
                descriptor = os.open(path, os.O_RDONLY)
            found = os.fstat(descriptor).st_size
            if found != num_bytes:
                os.close(descriptor)
                raise CheckpointError(f"{path} is damaged: it has {found} bytes, not {num_bytes}")
            if self._descriptors.setdefault(file, descriptor) != descriptor:
                os.close(descriptor)  # another thread opened it first
        return self._descriptors[file]


@dataclass(frozen=True, eq=False)
class SavedTensor(Lazy):
    """A tensor of a checkpoint, verified as it is read."""

    checkpoint: CheckpointReader
    name: str

    def load(self) -> Tensor:
        return self.checkpoint.read(self.name)

    def load_box(self, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        return self.checkpoint.read_slice(self.name, start, shape)


def open_checkpoint(
    path: Path, moved: Moved = ignore, group: dist.ProcessGroup | None = None
) -> CheckpointReader:
    """Opens a checkpoint, on all ranks of a group if there is one: then one of them reads marker
    and index and broadcasts the bytes, which the others verify as if they had read them. The index
    lists every part of every rank; if 5,120 ranks read it, that one file would have to serve 59
    GB."""
    read, problem = None, ""
    if group is None or dist.get_rank(group) == 0:
        try:
            read = read_marker(path), read_bytes(path / INDEX)
        except CheckpointError as error:
            problem = str(error)
    read, problem = broadcast((read, problem), group)
    if read is None:
        raise CheckpointError(problem)
    about, data = read
    named = CHECKPOINT.match(path.name)
    if named and int(named[1]) != about["step"]:
        raise CheckpointError(
            f"{path} holds step {about['step']}, which its name contradicts; rename or move it"
        )
    if len(data) != about["index_bytes"] or zlib.crc32(data) != about["index_crc32"]:
        raise CheckpointError(f"{path / INDEX} is damaged: it does not match {COMMITTED}")
    return CheckpointReader(path, Index.from_json(data, path / INDEX), about, moved)


def read_marker(path: Path) -> dict[str, Any]:
    """Returns the contents of COMMITTED; a folder without it is not a checkpoint."""
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist or is not a folder")
    if not (path / COMMITTED).exists():
        raise CheckpointError(f"{path} is not a committed checkpoint: no {COMMITTED}")
    try:
        return parse_marker(read_bytes(path / COMMITTED))
    except (ValueError, RecursionError):
        raise CheckpointError(
            f"{path / COMMITTED} is damaged: it changed after it was written"
        ) from None


def fill(checkpoint: CheckpointReader, state: Tensors) -> None:
    shapes = {name: tuple(entry.shape) for name, entry in checkpoint.tensors.items()}
    require_fit(checkpoint.path, shapes, state)
    jobs: list[Callable[[], None]] = []
    with torch.no_grad():
        for name, tensor in state.items():
            shard, start, _ = local_part(tensor)
            found = checkpoint.jobs(name, shard, start)
            jobs += [partial(_on_device, shard.device, job) for job in found]
    in_threads(jobs, NUM_THREADS, "checkpoint-read")
    if any(shard_of(tensor).is_cuda for tensor in state.values()):
        torch.cuda.synchronize()


def in_threads(jobs: Iterable[Callable[[], None]], num_threads: int, name: str) -> None:
    """Runs all jobs; the first error cancels the rest. The threads are daemons, so that one that
    hangs in a file system cannot keep the process alive."""
    left, errors = deque(jobs), deque[BaseException]()

    def work() -> None:
        while not errors:
            try:
                job = left.popleft()
            except IndexError:
                return
            try:
                job()
            except BaseException as error:
                errors.append(error)

    threads = [
        threading.Thread(target=work, name=f"{name}_{number}", daemon=True)
        for number in range(min(num_threads, len(left)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def require_fit(path: Path, saved: Mapping[str, tuple[int, ...]], state: Tensors) -> None:
    """Raises unless every tensor of `state` was saved, with its shape."""
    if missing := [name for name in state if name not in saved]:
        is_state = missing[0].startswith("optimizer.")
        out = ": `--skip-optimizer` starts with a new optimizer" if is_state else ""
        raise MismatchError(f"{path} has no {first_few(missing)}, which this run needs{out}")
    for name, tensor in state.items():
        if saved[name] != tuple(tensor.shape):
            raise MismatchError(
                f"{path} has {name} with shape {list(saved[name])}, but this run needs "
                f"{list(tensor.shape)}"
            )


def refuse_unused(path: Path, saved: Iterable[str], taken: Collection[str]) -> None:
    """Raises if saved weights would be left unused, since that would be a different model."""
    unused = [name for name in saved if name.startswith("model.") and name not in taken]
    if unused:
        raise MismatchError(
            f"{path} has {first_few(unused)}, which the model in this config does not have: resume "
            "with the model that was saved, or start a new run from its weights "
            "(checkpoint.initial_load_path)"
        )


def fill_local(checkpoint: CheckpointReader, state: Tensors, rank: int, world_size: int) -> None:
    """Loads what a local save wrote: this rank's own tensors, which require the same layout."""
    if checkpoint.index.world_size != world_size:
        raise MismatchError(
            f"{checkpoint.path} was saved with checkpoint.type = local by "
            f"{checkpoint.index.world_size} ranks, but this run has {world_size}: it can only be "
            f"read in the same layout; run on {checkpoint.index.world_size} ranks again"
        )
    shards = {local_name(name, rank): shard_of(tensor) for name, tensor in state.items()}
    fill(checkpoint, {name: shard for name, shard in shards.items() if shard.numel()})


def read_bytes(path: Path) -> bytes:
    with _reading(path):
        return path.read_bytes()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def _on_device(device: torch.device, job: Callable[[], None]) -> None:
    """Runs a job without gradients and on its device: both settings are per thread."""
    with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        job()


def part_bytes(entry: TensorEntry, part: Part) -> int:
    return math.prod(part.shape) * entry.dtype.itemsize
