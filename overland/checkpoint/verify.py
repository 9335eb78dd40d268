"""Reads every byte of a checkpoint and says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from overland.checkpoint.checksum import BLOCK, checksum
from overland.checkpoint.errors import CheckpointError
from overland.checkpoint.folder import NAME
from overland.checkpoint.format import COMMITTED, INDEX, tile
from overland.checkpoint.read import NUM_THREADS, PIECE, Checkpoint, open_checkpoint, part_bytes

Progress = Callable[[int], None]
"""Called with the number of bytes verified since the last call; from several threads."""


def verify(path: Path, progress: Progress = lambda _: None) -> list[str]:
    """What is wrong, a sentence each; nothing, if all of it is as it was committed."""
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        return [str(error)]

    def problem_of(job: Callable[[], int]) -> str:
        try:
            progress(job())
            return ""
        except CheckpointError as error:
            return str(error)

    with checkpoint, ThreadPoolExecutor(NUM_THREADS, "checkpoint-verify") as pool:
        found = [*_unknown_files(checkpoint), *_gaps(checkpoint)]
        found += pool.map(problem_of, [*_headers(checkpoint), *_pieces(checkpoint)])
    return list(dict.fromkeys(text for text in found if text))  # a missing file is told once


def find_checkpoints(path: Path) -> list[Path]:
    """The checkpoint that `path` is, or those of the run or folder that it is, oldest first."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not there, or is no folder")
    if any((path / name).exists() for name in (COMMITTED, INDEX)):
        return [path]
    for pattern in ("step_*", "*/step_*"):
        if found := sorted(path.glob(pattern), key=_by_step):
            return found
    raise CheckpointError(f"{path} is neither a checkpoint nor a folder that holds any")


def total_bytes(path: Path) -> int:
    """How much there is to verify; nothing, if the checkpoint cannot even be opened."""
    try:
        with open_checkpoint(path) as checkpoint:
            return sum(info.num_bytes for info in checkpoint.index.files.values())
    except CheckpointError:
        return 0


def _headers(checkpoint: Checkpoint) -> Iterator[Callable[[], int]]:
    for file, info in checkpoint.index.files.items():

        def job(
            file: str = file, size: int = info.header, right: int = info.header_checksum
        ) -> int:
            data = checkpoint.read_raw(file, 0, size)
            if checksum(memoryview(data.numpy().data)) != right:
                raise CheckpointError(f"{checkpoint.path / file} is damaged: its header is another")
            return size

        yield job
        for i, right in enumerate(info.blocks):
            yield partial(_verify_block, checkpoint, file, i * BLOCK, right)


def _verify_block(checkpoint: Checkpoint, file: str, begin: int, right: int) -> int:
    size = min(BLOCK, checkpoint.index.files[file].num_bytes - begin)
    if checksum(memoryview(checkpoint.read_raw(file, begin, size).numpy().data)) != right:
        raise CheckpointError(
            f"{checkpoint.path / file} is damaged: bytes {begin} to {begin + size} do not match "
            f"their checksum"
        )
    return 0


def _pieces(checkpoint: Checkpoint) -> Iterator[Callable[[], int]]:
    cpu = torch.device("cpu")
    for name, entry in checkpoint.tensors.items():
        for part in entry.parts:
            size = part_bytes(entry, part)
            for begin in range(0, size, PIECE):
                end = min(begin + PIECE, size)
                yield lambda n=name, p=part, a=begin, b=end: len(  # type: ignore[misc]
                    checkpoint.read_verified(n, p, a, b, cpu)
                )


def _by_step(path: Path) -> tuple[int, str]:
    named = NAME.match(path.name)
    return int(named[1]) if named else 0, path.name


def _unknown_files(checkpoint: Checkpoint) -> Iterator[str]:
    known = {*checkpoint.index.files, INDEX, COMMITTED}
    for path in sorted(checkpoint.path.iterdir()):
        if path.name not in known:
            yield f"{path} does not belong to this checkpoint"


def _gaps(checkpoint: Checkpoint) -> Iterator[str]:
    """A tensor whose parts do not add up to it."""
    for name, entry in checkpoint.tensors.items():
        if not tile(entry.shape, [(part.start, part.shape) for part in entry.parts]):
            yield f"{checkpoint.path}: the parts of {name} do not make up the whole"
