"""Writes one rank's files: each block is checksummed and written by one of a few threads."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overland.checkpoint.checksum import BLOCK, checksum, num_blocks
from overland.checkpoint.disk import Disk
from overland.checkpoint.format import COMMITTED, INDEX, Entry, FileInfo, Index, Part, marker
from overland.checkpoint.plan import Box, FilePlan, lay_out

NUM_THREADS = max(2, min(8, (os.cpu_count() or 2) // 2))

Bytes = Callable[[Box, int, int], memoryview]
"""The bytes of a box from one position to another, in host memory."""


def write_files(
    folder: Path, files: list[FilePlan], read: Bytes, disk: Disk, num_threads: int = NUM_THREADS
) -> list[list[int]]:
    """Writes and syncs the files; returns the checksums of each box, in the plan's order."""
    disk.make_folder(folder)
    sums = [[0] * num_blocks(box.num_bytes) for file in files for box in file.boxes]
    descriptors = []
    try:
        for file in files:
            descriptors.append(disk.create(folder / file.name))
        with ThreadPoolExecutor(num_threads, "checkpoint-write") as pool:
            jobs = []
            # The files take turns, so that threads seldom wait for one another's file.
            for file_index, box, offset, number in _in_turns(files):
                path, descriptor = folder / files[file_index].name, descriptors[file_index]
                for block in range(num_blocks(box.num_bytes)):
                    jobs.append(
                        pool.submit(
                            _write_block, disk, descriptor, path, read, box, offset, block,
                            sums[number],
                        )
                    )  # fmt: skip
            for file, descriptor in zip(files, descriptors, strict=True):
                disk.write_at(descriptor, memoryview(file.header), 0, folder / file.name)
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    for file, descriptor in zip(files, descriptors, strict=True):
        disk.close_durably(descriptor, folder / file.name)
    disk.sync_folder(folder)
    return sums


def _in_turns(files: list[FilePlan]) -> Iterable[tuple[int, Box, int, int]]:
    """(file, box, the box's offset in the file, the box's number in the plan)."""
    queues, first = [], 0
    for i, file in enumerate(files):
        offsets = file.offsets()
        queues.append([(i, b, offsets[j], first + j) for j, b in enumerate(file.boxes)])
        first += len(file.boxes)
    for position in range(max((len(queue) for queue in queues), default=0)):
        for queue in queues:
            if position < len(queue):
                yield queue[position]


def _write_block(
    disk: Disk,
    descriptor: int,
    path: Path,
    read: Bytes,
    box: Box,
    offset: int,
    block: int,
    sums: list[int],
) -> None:
    begin = block * BLOCK
    data = read(box, begin, min(begin + BLOCK, box.num_bytes))
    sums[block] = checksum(data)
    disk.write_at(descriptor, data, offset + begin, path)
    # Send it to the disk at once: the kernel alone would let a tenth of all memory fill up first.
    os.posix_fadvise(descriptor, offset + begin, len(data), os.POSIX_FADV_DONTNEED)


def build_index(
    kind: str,
    files_of_ranks: list[list[FilePlan]],
    sums: list[list[list[int]]],
    run: dict[str, Any],
) -> Index:
    """The index of files that lie written, from everyone's plans and checksums."""
    tensors: dict[str, Entry] = {}
    infos: dict[str, FileInfo] = {}
    for files, sums_of_rank in zip(files_of_ranks, sums, strict=True):
        remaining = iter(sums_of_rank)
        for file in files:
            infos[file.name] = FileInfo(file.num_bytes, len(file.header), checksum(file.header))
            for box, offset in zip(file.boxes, file.offsets(), strict=True):
                entry = tensors.setdefault(box.name, Entry(box.dtype, box.whole))
                part = Part(file.name, offset, box.start, box.shape, tuple(next(remaining)))
                entry.parts.append(part)
    return Index(kind, len(files_of_ranks), tensors, infos, run)


def commit(folder: Path, index: Index, about: dict[str, Any], disk: Disk) -> None:
    """The index, then the marker that makes the folder a checkpoint."""
    text = index.to_json()
    disk.write_file(folder / INDEX, text)
    disk.sync_folder(folder)
    disk.write_file(folder / COMMITTED, marker(text, about))
    disk.sync_folder(folder)


def write_whole(
    folder: Path,
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...], Callable[[], Tensor]]],
    run: dict[str, Any],
    about: dict[str, Any],
    disk: Disk | None = None,
    world_size: int = 1,
) -> None:
    """A committed checkpoint of whole tensors, each asked for in its turn and held alone."""
    disk = disk or Disk()
    listed = list(tensors)
    boxes = [Box(name, dtype, shape, (0,) * len(shape), shape) for name, dtype, shape, _ in listed]
    fetch = {name: ask for name, _, _, ask in listed}
    held: dict[str, memoryview] = {}

    def read(box: Box, begin: int, end: int) -> memoryview:
        if box.name not in held:
            held.clear()
            held[box.name] = bytes_of(fetch[box.name]())
        return held[box.name][begin:end]

    files = lay_out(boxes, 0)
    sums = write_files(folder, files, read, disk, num_threads=1)
    missing = [box for box in boxes if not box.num_bytes]
    index = build_index("full", [files], [sums], run)
    index.world_size = world_size  # of the run: its random streams are in here, too
    index.tensors |= {box.name: Entry(box.dtype, box.whole) for box in missing}
    commit(folder, index, about, disk)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor in host memory."""
    tensor = tensor.detach().contiguous()
    if not math.prod(tensor.shape):
        return memoryview(b"")
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
