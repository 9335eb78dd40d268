"""Detects changed files: a mark of each file is taken once and compared later, by size and bytes
rather than time; of large files in large corpora, it covers only some blocks.

The modification time changes when a file is copied or touched (which people do to keep files from
being purged), so a file counts as changed only if its size or its bytes differ. Bytes are compared
only if the time differs, and then all of them. Only in a corpus of more than `WHOLE_BYTES` are
large files marked by sixteen blocks each: an edit between those blocks that keeps the size goes
unnoticed, and `unsure_of` names the files that may have one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from overland.world.records import record

BLOCK_BYTES = 16 << 10
NUM_BLOCKS = 16
SMALL_BYTES = NUM_BLOCKS * BLOCK_BYTES  # smaller files are hashed whole
WHOLE_BYTES = 64 << 30  # takes one core a minute, once; tokenizing as much takes two hours
HASHERS = 16  # threads, which hash and wait for the disk in parallel
WHOLE = "whole:"


@record
class FileMark(NamedTuple):
    """A mark of a file, used to detect changes. Stored as a list in JSON."""

    size: int
    time_ns: int
    sample: str
    """Digest of the file. For files larger than 256 KiB, a digest of the whole file starts with
    `whole:`; otherwise it covers only some blocks."""

    @property
    def is_sure(self) -> bool:
        return self.size <= SMALL_BYTES or self.sample.startswith(WHOLE)


def marks_of_files(root: Path, files: Iterable[str], whole: bool = True) -> dict[str, FileMark]:
    """Takes marks of files; without `whole`, of some blocks of large ones."""
    paths = {file: root / file for file in files}
    stats = {file: os.stat(path) for file, path in paths.items()}
    whole = whole and sum(stat.st_size for stat in stats.values()) <= WHOLE_BYTES

    def mark(file: str) -> FileMark:
        stat = stats[file]
        return FileMark(stat.st_size, stat.st_mtime_ns, _digest(paths[file], stat, whole))

    with ThreadPoolExecutor(HASHERS) as pool:
        return dict(zip(paths, pool.map(mark, paths), strict=True))


def changed_files(root: Path, marks: Mapping[str, FileMark]) -> list[str]:
    """Returns a sentence for each file that has changed since it was marked."""

    def change(file: str) -> str | None:
        return _change(root / file, FileMark(*marks[file]))

    with ThreadPoolExecutor(HASHERS) as pool:
        return [sentence for sentence in pool.map(change, marks) if sentence]


def has_mark(path: Path, mark: FileMark) -> bool:
    """Whether a file, wherever it is now, has the bytes that were marked."""
    stat = os.stat(path)
    return (
        stat.st_size == mark.size
        and _digest(path, stat, mark.sample.startswith(WHOLE)) == mark.sample
    )


def unsure_of(root: Path, marks: Mapping[str, FileMark]) -> list[str]:
    """Returns the files that were touched, copied or edited and whose marks cover only blocks."""
    loose = ((file, mark) for file, mark in marks.items() if not FileMark(*mark).is_sure)
    return [file for file, mark in loose if os.stat(root / file).st_mtime_ns != mark[1]]


def digest_of(value: Any) -> str:
    """Digests marks and whatever else describes a source, without modification times."""
    text = json.dumps(_without_times(value))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _change(path: Path, mark: FileMark) -> str | None:
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return f"{path} no longer exists"
    if stat.st_size != mark.size:
        return f"{path} changed: it had {mark.size:,} bytes and now has {stat.st_size:,}"
    if stat.st_mtime_ns == mark.time_ns:
        return None
    if _digest(path, stat, mark.sample.startswith(WHOLE)) != mark.sample:
        return f"{path} changed: its size is the same, but its content is not"
    return None


def _digest(path: Path, stat: os.stat_result, whole: bool) -> str:
    """Digests a file or, if it is large and not wanted whole, some blocks of it."""
    if whole and stat.st_size > SMALL_BYTES:
        return WHOLE + _whole(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        if stat.st_size <= SMALL_BYTES:
            digest.update(file.read())
        else:
            for i in range(NUM_BLOCKS):  # the first block and the last are always among them
                file.seek((stat.st_size - BLOCK_BYTES) * i // (NUM_BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


# Marks are compared after every shard: with the cache, a file that was touched is hashed only once.
@lru_cache(maxsize=1 << 16)
def _whole(path: Path, size: int, time_ns: int, inode: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _without_times(value: Any) -> Any:
    if isinstance(value, FileMark):
        return [value.size, value.sample]
    if isinstance(value, dict):
        return [[key, _without_times(item)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_without_times(item) for item in value]
    return value
