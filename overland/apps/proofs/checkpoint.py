"""Reads every byte of a checkpoint and reports what is wrong with it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from overland.apps.convert.formats.lazy import is_tiled_by
from overland.apps.convert.formats.safetensors import read_safetensors
from overland.checkpoint.format import BLOCK, INDEX, checksum, marker_text, name_of_part
from overland.checkpoint.read import (
    NUM_THREADS,
    PIECE,
    CheckpointReader,
    open_checkpoint,
    part_bytes,
)
from overland.errors import CheckpointError
from overland.run_folder import CHECKPOINT, COMMITTED

_WRITER = re.compile(r"rank_(\d{5})")
_STREAM = re.compile(r"(?:rank_\d{5}/)?rng\.(\d+)\.")

Progress = Callable[[int], None]
"""Called with the number of bytes verified since the last call, from several threads."""


def verify(path: Path, progress: Progress = lambda _: None) -> list[str]:
    """Returns the problems, one sentence each; none if everything is as it was committed."""
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
        found = [*_unknown_files(checkpoint), *_contradictions(checkpoint)]
        impossible = list(_gaps(checkpoint))
        if impossible:  # then it is unknown which bytes to read
            return [*found, *impossible]
        found += _other_headers(checkpoint)
        found += pool.map(problem_of, [*_headers(checkpoint), *_pieces(checkpoint)])
    return list(dict.fromkeys(text for text in found if text))  # report a missing file only once


def find_checkpoints(path: Path) -> list[Path]:
    """Returns `path` if it is a checkpoint, otherwise those in the run or folder there, oldest
    first."""
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist or is not a folder")
    if any((path / name).exists() for name in (COMMITTED, INDEX)):
        return [path]
    for pattern in ("step_*", "*/step_*"):
        if found := sorted(path.glob(pattern), key=_by_step):
            return found
    raise CheckpointError(f"{path} is neither a checkpoint nor a folder of checkpoints")


def total_bytes(path: Path) -> int:
    """Returns the number of bytes to verify; 0 if the checkpoint cannot even be opened."""
    try:
        with open_checkpoint(path) as checkpoint:
            return sum(info.num_bytes for info in checkpoint.index.files.values())
    except CheckpointError:
        return 0


def _headers(checkpoint: CheckpointReader) -> Iterator[Callable[[], int]]:
    """Yields checks of headers and blocks, which return how many of their bytes no tensor
    counts."""

    def check(file: str, begin: int, size: int, right: int, changed: str, counted: int) -> int:
        data = checkpoint.read_raw(file, begin, size)
        if checksum(memoryview(data.numpy().data)) != right:
            raise CheckpointError(f"{checkpoint.path / file} is damaged: {changed}")
        return counted

    for file, info in checkpoint.index.files.items():
        changed, size = "its header has changed", info.header
        yield partial(check, file, 0, size, info.header_checksum, changed, size)
        for begin, right in zip(range(0, info.num_bytes, BLOCK), info.blocks, strict=False):
            size = min(BLOCK, info.num_bytes - begin)
            changed = f"bytes {begin} to {begin + size} do not match their checksum"
            yield partial(check, file, begin, size, right, changed, 0)


def _pieces(checkpoint: CheckpointReader) -> Iterator[Callable[[], int]]:
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
    named = CHECKPOINT.match(path.name)
    return int(named[1]) if named else 0, path.name


def _unknown_files(checkpoint: CheckpointReader) -> Iterator[str]:
    known = {*checkpoint.index.files, INDEX, COMMITTED}
    for path in sorted(checkpoint.path.iterdir()):
        if path.name not in known:
            yield f"{path} does not belong to this checkpoint"


def _gaps(checkpoint: CheckpointReader) -> Iterator[str]:
    """Yields tensors whose parts do not add up to the whole, or lie outside tensor or file."""
    for name, entry in checkpoint.tensors.items():
        try:
            checkpoint.check_parts(name)
        except CheckpointError as error:
            yield str(error)
            continue
        if not is_tiled_by(entry.shape, [(part.start, part.shape) for part in entry.parts]):
            yield f"{checkpoint.path}: the parts of {name} do not add up to the whole tensor"


def _contradictions(checkpoint: CheckpointReader) -> Iterator[str]:
    """Yields contradictions between marker, index and files: an edit that recomputed the checksums
    does not make these agree."""
    index, where = checkpoint.index, checkpoint.path / INDEX
    marked, ranks = checkpoint.about["step"], index.world_size
    marked_as = (checkpoint.path / COMMITTED).read_bytes()
    if marked_as != marker_text(json.loads(marked_as)):  # white space, say, changes nothing in it
        yield f"{checkpoint.path / COMMITTED} has bytes that were not written with it"
    progress = checkpoint.run.get("progress")
    if isinstance(progress, dict) and progress.get("step", marked) != marked:
        yield f"{where} is for step {progress['step']!s:.50}, but {COMMITTED} for step {marked}"
    if index.kind not in ("shard", "full", "local"):
        yield f"{where} has the unknown type {index.kind!r:.50}"
    writers = {int(found[1]) for file in index.files if (found := _WRITER.match(file))}
    if writers and max(writers) >= (1 if index.kind == "full" else ranks):
        yield f"{where} is for {ranks} ranks, but lists a file of rank {max(writers)}"
    streams = {int(found[1]) for name in index.tensors if (found := _STREAM.match(name))}
    if streams and streams != set(range(ranks)):
        yield f"{where} is for {ranks} ranks, but has the random streams of {len(streams)}"
    converted = index.kind == "full" and ranks == 1  # it keeps the layout of the original run
    layout = checkpoint.run.get("layout")
    if isinstance(layout, dict) and not converted:
        yield from _other_layout(checkpoint, layout)


def _other_layout(checkpoint: CheckpointReader, layout: dict[str, Any]) -> Iterator[str]:
    index, where = checkpoint.index, checkpoint.path / INDEX
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    shown = ", ".join(f"{axis} {layout.get(axis)!s:.50}" for axis in axes)
    if any(type(layout.get(axis)) is not int for axis in axes):
        yield f"{where} has a layout with values that are not numbers: {shown}"
        return
    if math.prod(layout[axis] for axis in axes) != index.world_size:
        yield f"{where} is for {index.world_size} ranks, which its layout does not match: {shown}"
    most = layout["dp_shard"] * layout["cp"] * layout["tp"]
    for name, entry in checkpoint.tensors.items():
        if index.kind == "shard" and len(entry.parts) > most:
            count = len(entry.parts)
            yield f"{where} has {name} in {count} parts, more than its layout allows: {shown}"
            return


def _other_headers(checkpoint: CheckpointReader) -> Iterator[str]:
    """Yields contradictions between index and headers: every file of tensors lists its own
    parts."""
    files = [file for file in checkpoint.index.files if file.endswith(".safetensors")]
    in_index: dict[str, dict[str, Any]] = {file: {} for file in files}
    for name, entry in checkpoint.tensors.items():
        for part in entry.parts:
            if part.file in in_index:
                stored = name_of_part(name, part.start, part.shape, entry.shape)
                in_index[part.file][stored] = entry.dtype, part.shape, part.offset
    for file, expected in in_index.items():
        path = checkpoint.path / file
        try:
            tensors = read_safetensors(path)
        except FileNotFoundError:  # which is reported for its header
            continue
        except CheckpointError as error:
            yield str(error)
            continue
        found = {name: (one.dtype, one.shape, one.offset) for name, one in tensors.items()}
        if wrong := sorted(name for name, _ in expected.items() ^ found.items()):
            yield f"{path} does not hold what {INDEX} lists: {wrong[0]} differs in its header"
