"""Which file changed: a mark per file, taken once and compared later.

The time of a file changes when it is copied or touched (which people do to keep files from being
purged), so a file counts as changed only if its size or its bytes differ. Bytes are looked at only
where the time differs; of a large file, sixteen blocks spread over it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

BLOCK_BYTES = 16 << 10
NUM_BLOCKS = 16


class FileMark(NamedTuple):
    """JSON keeps it as a list."""

    size: int
    time_ns: int
    sample: str
    """Digest of the file, or of blocks of it if it is larger than 256 KiB."""


def mark_files(root: Path, files: Iterable[str]) -> dict[str, FileMark]:
    return {file: _mark(root / file) for file in files}


def changed_files(root: Path, marks: Mapping[str, FileMark]) -> list[str]:
    """What became of the files since they were marked: a sentence for each that is not the same."""
    sentences = (_change(root / file, FileMark(*mark)) for file, mark in marks.items())
    return [sentence for sentence in sentences if sentence]


def digest_of(value: Any) -> str:
    """Of marks and whatever else describes a source; times are left out."""
    text = json.dumps(_without_times(value))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _change(path: Path, mark: FileMark) -> str | None:
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return f"{path} is gone"
    if stat.st_size != mark.size:
        return f"{path} changed: it had {mark.size:,} bytes and has {stat.st_size:,}"
    if stat.st_mtime_ns != mark.time_ns and _sample(path, stat.st_size) != mark.sample:
        return f"{path} changed: its size is the same, its content is not"
    return None


def _mark(path: Path) -> FileMark:
    stat = os.stat(path)
    return FileMark(stat.st_size, stat.st_mtime_ns, _sample(path, stat.st_size))


def _sample(path: Path, size: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
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
