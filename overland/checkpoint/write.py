"""Writes one rank's files (several threads checksum and write the blocks), the index of all files,
and whole tensors."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overland.checkpoint.format import (
    BLOCK,
    INDEX,
    FileInfo,
    Index,
    Part,
    TensorEntry,
    checksum,
    marker,
    num_blocks,
)
from overland.checkpoint.lazy import Lazy
from overland.checkpoint.plan import Box, FilePlan, lay_out_files
from overland.checkpoint.read import CheckpointReader, SavedTensor, in_threads
from overland.files import Disk, Moved, ignore
from overland.plugins import plugin
from overland.run_folder import COMMITTED
from overland.world.records import record

NUM_THREADS = max(2, min(8, (os.cpu_count() or 2) // 2))
# Bytes written between two signs of progress: a whole block takes too long on a slow disk that the
# ranks of a node share.
PIECE = 2**22
# The kernel may buffer tens of GB, and a single sync at the end would then take minutes without a
# sign of progress. So files are synced whenever this much has been written. On a machine with an
# H200, 16 GB in 4 files: 2.5 GB/s without, 2.2 with 64 MiB, 2.4 with 256, 2.5 with 512.
SYNC_BYTES = 2**29

Bytes = Callable[[Box, int, int], memoryview]
"""The bytes of a box from one position to another, in host memory."""


@record
class WrittenFile(NamedTuple):
    """A written file: length and checksum of its header, and the checksums of its boxes."""

    header: int
    header_checksum: int
    sums: list[list[int]]


def write_files(
    folder: Path,
    files: list[FilePlan],
    read: Bytes,
    disk: Disk,
    num_threads: int = NUM_THREADS,
    moved: Moved = ignore,
) -> list[WrittenFile]:
    """Writes and syncs the files; returns their checksums."""
    disk.make_folder(folder)
    written = [
        WrittenFile(
            len(file.header),
            checksum(file.header),
            [[0] * num_blocks(box.num_bytes) for box in file.boxes],
        )
        for file in files
    ]
    opened: list[_Open] = []
    try:
        for file in files:
            path = folder / file.name
            opened.append(_Open(disk, disk.create(path), path, moved))
        jobs: list[Callable[[], None]] = []
        for file, target in zip(files, opened, strict=True):
            jobs.append(partial(target.write, memoryview(file.header), 0))
        # The files take turns, so that threads rarely wait for the same file.
        for i, number, box, offset in _in_turns(files):
            for block in range(num_blocks(box.num_bytes)):
                sums = written[i].sums[number]
                jobs.append(partial(_write_block, opened[i], read, box, offset, block, sums))
        in_threads(jobs, num_threads, "checkpoint-write")
        while opened:
            opened.pop(0).close_durably()
    except BaseException:
        for target in opened:
            os.close(target.descriptor)
        raise
    disk.sync_folder(folder)
    return written


class _Open:
    """A file that several threads write to."""

    def __init__(self, disk: Disk, descriptor: int, path: Path, moved: Moved) -> None:
        self.descriptor = descriptor
        self._disk, self._path, self._moved = disk, path, moved
        self._unsynced, self._lock = 0, threading.Lock()

    def write(self, data: memoryview, offset: int) -> None:
        for begin in range(0, len(data), PIECE):
            piece = data[begin : begin + PIECE]
            self._disk.write_at(self.descriptor, piece, offset + begin, self._path)
            self._moved(len(piece))
        # Start writing to disk now: the kernel would otherwise let a tenth of all memory fill up.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, offset, len(data), os.POSIX_FADV_DONTNEED)
        with self._lock:
            self._unsynced += len(data)
            is_due = self._unsynced >= SYNC_BYTES
            self._unsynced = 0 if is_due else self._unsynced
        if is_due:
            self._disk.sync_so_far(self.descriptor, self._path)
            self._moved(0)

    def close_durably(self) -> None:
        self._disk.close_durably(self.descriptor, self._path)
        self._moved(0)


def _in_turns(files: list[FilePlan]) -> Iterable[tuple[int, int, Box, int]]:
    """Yields (file, number of the box in it, box, offset of the box), from each file in turn."""
    queues = []
    for i, file in enumerate(files):
        placed = enumerate(_placed(file.boxes, len(file.header)))
        queues.append([(i, number, box, offset) for number, (box, offset) in placed])
    for some in itertools.zip_longest(*queues):
        yield from (one for one in some if one is not None)


def _placed(boxes: list[Box], start: int) -> Iterator[tuple[Box, int]]:
    """Yields boxes and their offsets in the file; the first is at `start`."""
    for box in boxes:
        yield box, start
        start += box.num_bytes


def _write_block(
    file: _Open, read: Bytes, box: Box, offset: int, block: int, sums: list[int]
) -> None:
    begin = block * BLOCK
    data = read(box, begin, min(begin + BLOCK, box.num_bytes))
    sums[block] = checksum(data)
    file.write(data, offset + begin)


def build_index(
    kind: str,
    files_of_ranks: list[list[FilePlan]],
    written: list[list[WrittenFile]],
    run: dict[str, Any],
) -> Index:
    """Builds the index of the written files from the plans and checksums of all ranks."""
    tensors: dict[str, TensorEntry] = {}
    infos: dict[str, FileInfo] = {}
    for files, done in zip(files_of_ranks, written, strict=True):
        for file, result in zip(files, done, strict=True):
            end = result.header
            for (box, offset), sums in zip(
                _placed(file.boxes, result.header), result.sums, strict=True
            ):
                entry = tensors.setdefault(box.name, TensorEntry(box.dtype, box.whole))
                entry.parts.append(Part(file.name, offset, box.start, box.shape, sums))
                end = offset + box.num_bytes
            infos[file.name] = FileInfo(end, result.header, result.header_checksum)
    return Index(kind, len(files_of_ranks), tensors, infos, run)


def commit(folder: Path, index: Index, about: dict[str, Any], disk: Disk) -> None:
    """Writes the index, then the marker that makes the folder a checkpoint."""
    text = index.to_json()
    disk.write_file(folder / INDEX, text)
    disk.sync_folder(folder)
    disk.write_file(folder / COMMITTED, marker(text, about))
    disk.sync_folder(folder)


def write_whole_tensors(
    folder: Path,
    tensors: Mapping[str, Lazy],
    run: dict[str, Any],
    about: dict[str, Any],
    disk: Disk | None = None,
    world_size: int = 1,
    moved: Moved = ignore,
) -> None:
    """Writes a committed checkpoint of whole tensors, loading one at a time."""
    disk = disk or Disk()
    boxes = [
        Box(name, one.dtype, one.shape, (0,) * len(one.shape), one.shape)
        for name, one in tensors.items()
    ]
    held: dict[str, memoryview] = {}

    def read(box: Box, begin: int, end: int) -> memoryview:
        if box.name not in held:
            held.clear()
            held[box.name] = bytes_of(tensors[box.name].load())
        return held[box.name][begin:end]

    files = lay_out_files(boxes, 0)
    written = write_files(folder, files, read, disk, num_threads=1, moved=moved)
    missing = [box for box in boxes if not box.num_bytes]
    index = build_index("full", [files], [written], run)
    index.world_size = world_size  # of the run, since its random streams are included
    index.tensors |= {box.name: TensorEntry(box.dtype, box.whole) for box in missing}
    commit(folder, index, about, disk)


def write_full(
    beside: Path, index: Index, about: dict[str, Any], full_format: str, disk: Disk, moved: Moved
) -> None:
    """Turns the parts in `beside` into a committed checkpoint of whole tensors, in files that need
    no index to be read (`checkpoint.type = full`).

    The bytes are written twice, but no rank ever holds more than one whole tensor.
    """
    shards = beside.with_name(beside.name.removesuffix(".tmp") + ".shards")
    disk.remove_folder(shards)
    disk.rename(beside, shards)
    try:
        with CheckpointReader(shards, index, about, moved) as parts:
            if full_format == "torch":
                plugin("four_files").write_four_files(parts, beside, about, disk, moved)
            else:
                tensors = {
                    name: SavedTensor(entry.shape, entry.dtype, parts, name)
                    for name, entry in parts.tensors.items()
                }
                write_whole_tensors(
                    beside, tensors, index.run, about, disk, index.world_size, moved
                )
    finally:
        disk.remove_folder(shards)


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor that is in host memory."""
    tensor = tensor.detach().contiguous()
    if not math.prod(tensor.shape):
        return memoryview(b"")
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
