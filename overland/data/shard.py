"""A shard: the documents of some consecutive chunks as token ids, or as bytes, in one file.

    head      64 bytes, see `HEAD`
    tokens    all documents concatenated, little-endian uint16 or uint32, or bytes; padded to
              8 bytes
    channels  in format 2, further arrays with an element per token, each padded to 8 bytes
    offsets   int64, one more than documents: document i is tokens[offsets[i] : offsets[i + 1]]
    note      JSON: the first and the last chunk; in format 2 also the channels and their types, and
              counts of documents that were left out or truncated

Token ids without channels are written in format 1.

The file is complete or absent: it is written to a temporary file, flushed to disk and renamed. It
contains no times or machine names, so its bytes are the same whoever makes it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from overland.errors import DataError
from overland.files import replaced

MAGIC = b"OVLSHARD"
FORMAT = 1
WITH_CHANNELS = 2
# magic, format, bytes per token, documents, tokens, bad documents, largest id, bytes of the note,
# the first 8 bytes of the checksum, CRC-32 of everything before it
HEAD = struct.Struct("<8sHHQQQqI8sQ")
BYTES = "|u1"
DTYPES = {1: BYTES, 2: "<u2", 4: "<u4"}
VERIFY_BYTES = 1 << 22  # hashed at once, while other threads go on
FLUSH_TOKENS = 1 << 18  # written at once: writing each document of 100 tokens would be slower

Ids = npt.NDArray[np.generic]
TOKENS = "tokens"
"""The field with the ids, in the structured array of a document that has channels."""
WEIGHTS = "weights"
"""The channel with the loss weight of each token."""


class ShardInfo(NamedTuple):
    num_documents: int
    num_tokens: int
    num_bad: int
    """Bad documents that were skipped."""
    max_token: int
    """The largest id, or -1 without tokens."""
    dtype: str
    chunks: tuple[str, str]
    """The first and the last of its chunks."""
    checksum: str
    """Checksum of everything after the head."""
    channels: Mapping[str, str] = {}
    """The types of the channels, by name."""
    counts: Mapping[str, int] = {}
    """How many documents were left out or truncated as requested, by what was done."""


@dataclass(frozen=True)
class Shard:
    """An open shard; its arrays are memory-mapped, and stay readable if the file is deleted."""

    path: Path
    info: ShardInfo
    tokens: Ids
    offsets: npt.NDArray[np.int64]
    channels: Mapping[str, Ids]
    data: mmap.mmap
    """The whole file."""
    identity: tuple[int, int]
    """Inode and time of the file: a shard that is made again is another file."""

    def document(self, number: int) -> Ids:
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    def verify(self) -> None:
        """Reads the whole file and verifies its checksum."""
        digest = hashlib.blake2b(digest_size=8)
        self.data.madvise(mmap.MADV_WILLNEED)
        with memoryview(self.data) as data:
            for at in range(HEAD.size, len(data), VERIFY_BYTES):
                digest.update(data[at : at + VERIFY_BYTES])
        if digest.hexdigest() != self.info.checksum:
            raise DataError(
                f"{self.path} is damaged: its checksum does not match; delete it and build it again"
            )


def open_shard(path: Path) -> Shard:
    """Maps a shard into memory. This checks its head and size; `Shard.verify` checks its bytes."""
    with path.open("rb") as file:
        head = file.read(HEAD.size)
        stat = os.fstat(file.fileno())
        size = stat.st_size
        about = _parse(head, path)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    chunks, channels, counts = _read_note(data, about, path)
    types = [DTYPES[about.width], *channels.values()]
    *places, offsets_at, note_at = _places(about.num_documents, about.num_tokens, types)
    if size != note_at + about.note_bytes:
        raise DataError(
            f"{path} is truncated or damaged: it has {size:,} bytes, but its header says "
            f"{note_at + about.note_bytes:,}; delete it and build it again"
        )
    tokens, *rest = (
        np.frombuffer(data, dtype, about.num_tokens, at)
        for dtype, at in zip(types, places, strict=True)
    )
    offsets = np.frombuffer(data, "<i8", about.num_documents + 1, offsets_at)
    if offsets[0] != 0 or offsets[-1] != about.num_tokens:
        raise DataError(f"{path} is damaged: its documents do not cover its tokens")
    info = ShardInfo(
        about.num_documents, about.num_tokens, about.num_bad, about.max_token, DTYPES[about.width],
        chunks, about.checksum, channels, counts,
    )  # fmt: skip
    further = dict(zip(channels, rest, strict=True))
    return Shard(path, info, tokens, offsets, further, data, (stat.st_ino, stat.st_mtime_ns))


def read_counts(path: Path) -> tuple[int, int, int]:
    """Reads the numbers of documents, tokens and bad documents of a shard from its head."""
    with path.open("rb") as file:
        about = _parse(file.read(HEAD.size), path)
    return about.num_documents, about.num_tokens, about.num_bad


def write_shard(
    path: Path,
    documents: Iterable[Ids],
    dtype: str,
    chunks: tuple[str, str] = ("", ""),
    num_bad: Callable[[], int] = lambda: 0,
    beside: Path | None = None,
    channels: Mapping[str, str] | None = None,
    counts: Callable[[], Mapping[str, int]] = dict,
) -> ShardInfo:
    """Writes documents as they come; only their offsets and channels are held in memory.

    With `channels` (types by name), each document is a structured array that has them next to its
    `tokens`. `num_bad` and `counts` are called at the end. `beside` is the temporary file, before
    it is published. Raises FileNotFoundError if someone deletes it in the meantime.
    """
    width = np.dtype(dtype).itemsize
    assert dtype == DTYPES[width]
    channels = dict(channels or {})
    version = WITH_CHANNELS if channels or dtype == BYTES else FORMAT
    with replaced(path, beside=beside, shared=True) as file:
        file.write(bytes(HEAD.size))
        digest = hashlib.blake2b(digest_size=8)
        tee = _Tee(file, digest)
        offsets, max_token = _write_tokens(tee, documents, dtype, channels)
        tee.write(offsets.astype("<i8").tobytes())
        about: Any = chunks
        counted = dict(sorted(counts().items()))
        if version != FORMAT:
            about = {"chunks": chunks, "channels": channels}
            about |= {"counts": counted} if counted else {}
        note = json.dumps(about).encode()
        tee.write(note)
        info = ShardInfo(
            len(offsets) - 1, int(offsets[-1]), num_bad(), max_token, dtype, chunks,
            digest.hexdigest(), channels, counted,
        )  # fmt: skip
        file.seek(0)
        file.write(_head(info, version, width, len(note)))
    return info


class _Tee:
    """Writes to a file and updates a digest."""

    def __init__(self, file: BinaryIO, digest: hashlib.blake2b) -> None:
        self.file, self.digest = file, digest

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)


def _write_tokens(
    file: _Tee, documents: Iterable[Ids], dtype: str, channels: Mapping[str, str]
) -> tuple[npt.NDArray[np.int64], int]:
    """Writes tokens and channels; returns the offsets of documents, and the largest id."""
    lengths, max_token = [0], -1
    limit = 1 << 8 * np.dtype(dtype).itemsize
    kept: dict[str, list[bytes]] = {name: [] for name in channels}
    for batch in _batches(documents):
        ids: npt.NDArray[Any] = np.concatenate(batch)
        lengths.extend(map(len, batch))
        if channels:
            for name, type_ in channels.items():
                kept[name].append(ids[name].astype(type_).tobytes())
            ids = ids[TOKENS]
        if ids.size:
            max_token = max(max_token, int(ids.max()))
            assert int(ids.min()) >= 0
            assert max_token < limit
        file.write(ids.astype(dtype).tobytes())
    offsets = np.cumsum(np.asarray(lengths, np.int64))
    file.write(_padding(int(offsets[-1]) * np.dtype(dtype).itemsize))
    for parts in kept.values():
        for part in parts:
            file.write(part)
        file.write(_padding(sum(map(len, parts))))
    return offsets, max_token


def _batches(documents: Iterable[Ids]) -> Iterator[list[Ids]]:
    batch, count = [], 0
    for document in documents:
        batch.append(document)
        count += len(document)
        if count >= FLUSH_TOKENS:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch


def _padding(num_bytes: int) -> bytes:
    return bytes(-num_bytes % 8)


def _places(num_documents: int, num_tokens: int, types: Iterable[str]) -> list[int]:
    """Returns the offsets of tokens, channels, document offsets and note in the file."""
    places = [HEAD.size]
    for one in types:
        num_bytes = num_tokens * np.dtype(one).itemsize
        places.append(places[-1] + num_bytes + len(_padding(num_bytes)))
    return [*places, places[-1] + 8 * (num_documents + 1)]


def _read_note(
    data: mmap.mmap, about: _Head, path: Path
) -> tuple[tuple[str, str], dict[str, str], dict[str, int]]:
    """Reads the first and the last chunk, the types of the channels, and the counts."""
    try:
        note = json.loads(data[len(data) - about.note_bytes :])
        if about.version == FORMAT:
            note = {"chunks": note, "channels": {}}
        first, last = note["chunks"]
        channels = {name: np.dtype(one).str for name, one in note["channels"].items()}
        return (first, last), channels, dict(note.get("counts", {}))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(
            f"{path} is truncated or damaged: its end cannot be read; delete it and build it again"
        ) from None


def _head(info: ShardInfo, version: int, width: int, note_bytes: int) -> bytes:
    fields = (
        MAGIC, version, width, info.num_documents, info.num_tokens, info.num_bad, info.max_token,
        note_bytes, bytes.fromhex(info.checksum),
    )  # fmt: skip
    return HEAD.pack(*fields, zlib.crc32(HEAD.pack(*fields, 0)))


class _Head(NamedTuple):
    version: int
    width: int
    num_documents: int
    num_tokens: int
    num_bad: int
    max_token: int
    note_bytes: int
    checksum: str


def _parse(head: bytes, path: Path) -> _Head:
    if len(head) < HEAD.size or not head.startswith(MAGIC):
        raise DataError(
            f"{path} is not a token shard, or is truncated; delete it and build it again"
        )
    fields = HEAD.unpack(head)
    if fields[1] not in (FORMAT, WITH_CHANNELS):
        raise DataError(
            f"{path} has format {fields[1]}, but this version reads {FORMAT} and {WITH_CHANNELS}: "
            "build it again"
        )
    if fields[-1] != zlib.crc32(HEAD.pack(*fields[:-1], 0)):
        raise DataError(f"{path} is damaged in its header; delete it and build it again")
    _, version, width, num_documents, num_tokens, num_bad, max_token, note, checksum, _ = fields
    return _Head(
        version, width, num_documents, num_tokens, num_bad, max_token, note, checksum.hex()
    )
