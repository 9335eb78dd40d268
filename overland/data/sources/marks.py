"""Which file changed: a mark per file, taken once and compared later.

The time of a file changes when it is copied or touched (which people do to keep files from being
purged), so a file counts as changed only if its size or its bytes differ. Bytes are looked at only
where the time differs, and then all of them. Only a corpus of more than `WHOLE_BYTES` is marked by
sixteen blocks of each large file, as all were by earlier versions: what is edited between them,
without a change of size, goes unseen there, and `unsure_of` names the files it may concern.
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

BLOCK_BYTES = 16 << 10
NUM_BLOCKS = 16
WHOLE_BYTES = 64 << 30  # a minute for one core, once; tokenising as much takes it two hours
HASHERS = 16  # threads, which hash side by side and wait for the disk together
WHOLE = "whole:"


class FileMark(NamedTuple):
    """A mark of a file, by which a change is found. JSON keeps it as a list."""

    size: int
    time_ns: int
    sample: str
    """Digest of the file. If it is larger than 256 KiB, either of all of it, which `whole:` says,
    or of blocks of it."""

    @property
    def is_sure(self) -> bool:
        return self.size <= NUM_BLOCKS * BLOCK_BYTES or self.sample.startswith(WHOLE)


def marks_of_files(root: Path, files: Iterable[str], whole: bool = True) -> dict[str, FileMark]:
    """Marks of files; without `whole` those that earlier versions took."""
    paths = {file: root / file for file in files}
    stats = {file: os.stat(path) for file, path in paths.items()}
    whole = whole and sum(stat.st_size for stat in stats.values()) <= WHOLE_BYTES

    def mark(file: str) -> FileMark:
        stat = stats[file]
        look = _whole if whole else _sample
        return FileMark(stat.st_size, stat.st_mtime_ns, look(paths[file], stat))

    with ThreadPoolExecutor(HASHERS) as pool:
        return dict(zip(paths, pool.map(mark, paths), strict=True))


def changed_files(root: Path, marks: Mapping[str, FileMark]) -> list[str]:
    """Returns what became of the files since they were marked: a sentence for each that is not the
    same."""

    def change(file: str) -> str | None:
        return _change(root / file, FileMark(*marks[file]))

    with ThreadPoolExecutor(HASHERS) as pool:
        return [sentence for sentence in pool.map(change, marks) if sentence]


def has_mark(path: Path, mark: FileMark) -> bool:
    """Whether a file, wherever it is, has the bytes that were marked."""
    stat = os.stat(path)
    return stat.st_size == mark.size and _look(path, stat, mark) == mark.sample


def unsure_of(root: Path, marks: Mapping[str, FileMark]) -> list[str]:
    """Files that were touched, copied or edited since they were marked by blocks of them alone."""
    loose = ((file, mark) for file, mark in marks.items() if not FileMark(*mark).is_sure)
    return [file for file, mark in loose if os.stat(root / file).st_mtime_ns != mark[1]]


def digest_of(value: Any) -> str:
    """Digests marks and whatever else describes a source; times are left out."""
    text = json.dumps(_without_times(value))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _change(path: Path, mark: FileMark) -> str | None:
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return f"{path} is gone"
    if stat.st_size != mark.size:
        return f"{path} changed: it had {mark.size:,} bytes and has {stat.st_size:,}"
    if stat.st_mtime_ns == mark.time_ns:
        return None
    if _look(path, stat, mark) != mark.sample:
        return f"{path} changed: its size is the same, its content is not"
    return None


def _look(path: Path, stat: os.stat_result, mark: FileMark) -> str:
    """Digests as much of a file as the mark is of."""
    return (_whole if mark.sample.startswith(WHOLE) else _sample)(path, stat)


def _whole(path: Path, stat: os.stat_result) -> str:
    if stat.st_size <= NUM_BLOCKS * BLOCK_BYTES:
        return _sample(path, stat)
    return WHOLE + _digest(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


# Whoever makes shards compares marks after each of them: a file that was touched is hashed once.
@lru_cache(maxsize=1 << 16)
def _digest(path: Path, size: int, time_ns: int, inode: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sample(path: Path, stat: os.stat_result) -> str:
    digest, size = hashlib.blake2b(digest_size=16), stat.st_size
    with path.open("rb") as file:
        if size <= NUM_BLOCKS * BLOCK_BYTES:
            digest.update(file.read())
        else:
            for i in range(NUM_BLOCKS):  # the first block and the last are always among them
                file.seek((size - BLOCK_BYTES) * i // (NUM_BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def _without_times(value: Any) -> Any:
    if isinstance(value, FileMark):
        return [value.size, value.sample]
    if isinstance(value, dict):
        return [[key, _without_times(item)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_without_times(item) for item in value]
    return value
