"""Writes one rank's files: each block is checksummed and written by one of a few threads."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overland.checkpoint.checksum import BLOCK, checksum, num_blocks
from overland.checkpoint.disk import Disk
from overland.checkpoint.format import COMMITTED, INDEX, Entry, FileInfo, Index, Part, marker
from overland.checkpoint.plan import Box, FilePlan, lay_out

NUM_THREADS = max(2, min(8, (os.cpu_count() or 2) // 2))

Bytes = Callable[[Box, int, int], memoryview]
"""The bytes of a box from one position to another, in host memory."""


class Written(NamedTuple):
    """A file as it turned out: its header's length and checksum, and the checksums of its boxes."""

    header: int
    header_checksum: int
    sums: list[list[int]]


def write_files(
    folder: Path, files: list[FilePlan], read: Bytes, disk: Disk, num_threads: int = NUM_THREADS
) -> list[Written]:
    """Writes and syncs the files."""
    disk.make_folder(folder)
    written = [
        Written(
            len(file.header),
            checksum(file.header),
            [[0] * num_blocks(box.num_bytes) for box in file.boxes],
        )
        for file in files
    ]
    descriptors = []
    try:
        for file in files:
            descriptors.append(disk.create(folder / file.name))
        with ThreadPoolExecutor(num_threads, "checkpoint-write") as pool:
            jobs = []
            # The files take turns, so that threads seldom wait for one another's file.
            for i, number, box, offset in _in_turns(files):
                path, descriptor = folder / files[i].name, descriptors[i]
                for block in range(num_blocks(box.num_bytes)):
                    jobs.append(
                        pool.submit(
                            _write_block, disk, descriptor, path, read, box, offset, block,
                            written[i].sums[number],
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
        for file in files:
            disk.close_durably(descriptors.pop(0), folder / file.name)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    disk.sync_folder(folder)
    return written


def _in_turns(files: list[FilePlan]) -> Iterable[tuple[int, int, Box, int]]:
    """(file, number of the box in it, box, the box's offset), one of each file in turn."""
    queues = []
    for i, file in enumerate(files):
        placed = enumerate(_placed(file.boxes, len(file.header)))
        queues.append([(i, number, box, offset) for number, (box, offset) in placed])
    for some in itertools.zip_longest(*queues):
        yield from (one for one in some if one is not None)


def _placed(boxes: list[Box], start: int) -> Iterator[tuple[Box, int]]:
    """Boxes and where each begins in its file, the first at `start`."""
    for box in boxes:
        yield box, start
        start += box.num_bytes


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
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset + begin, len(data), os.POSIX_FADV_DONTNEED)


def build_index(
    kind: str,
    files_of_ranks: list[list[FilePlan]],
    written: list[list[Written]],
    run: dict[str, Any],
) -> Index:
    """The index of files that lie written, from everyone's plans and checksums."""
    tensors: dict[str, Entry] = {}
    infos: dict[str, FileInfo] = {}
    for files, done in zip(files_of_ranks, written, strict=True):
        for file, result in zip(files, done, strict=True):
            end = result.header
            for (box, offset), sums in zip(
                _placed(file.boxes, result.header), result.sums, strict=True
            ):
                entry = tensors.setdefault(box.name, Entry(box.dtype, box.whole))
                entry.parts.append(Part(file.name, offset, box.start, box.shape, sums))
                end = offset + box.num_bytes
            infos[file.name] = FileInfo(end, result.header, result.header_checksum)
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
    written = write_files(folder, files, read, disk, num_threads=1)
    missing = [box for box in boxes if not box.num_bytes]
    index = build_index("full", [files], [written], run)
    index.world_size = world_size  # of the run: its random streams are in here, too
    index.tensors |= {box.name: Entry(box.dtype, box.whole) for box in missing}
    commit(folder, index, about, disk)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor in host memory."""
    tensor = tensor.detach().contiguous()
    if not math.prod(tensor.shape):
        return memoryview(b"")
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
