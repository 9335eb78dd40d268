"""A token shard: the documents of some consecutive chunks as token ids, in one file.

    head      64 bytes, see `HEAD`
    tokens    all documents one after another, little-endian uint16 or uint32; padded to 8 bytes
    offsets   int64, one more than documents: document i is tokens[offsets[i] : offsets[i + 1]]
    note      JSON: the first and the last chunk

The file is complete or absent: it is written beside, flushed to the disk and renamed. It holds no
times and no names of machines, so that whoever makes it makes the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from overland.data.errors import DataError

MAGIC = b"OVLSHARD"
FORMAT = 1
# magic, format, bytes per token, documents, tokens, bad documents, largest id, bytes of the note,
# the first 8 bytes of the checksum, CRC-32 of all before it
HEAD = struct.Struct("<8sHHQQQqI8sQ")
DTYPES = {2: "<u2", 4: "<u4"}
FLUSH_TOKENS = 1 << 18  # written at once; documents of 100 tokens one by one would cost more

Ids = npt.NDArray[np.generic]


class ShardInfo(NamedTuple):
    num_documents: int
    num_tokens: int
    num_bad: int
    """Documents that were skipped by policy."""
    max_token: int
    """The largest id, or -1 without tokens."""
    dtype: str
    chunks: tuple[str, str]
    """The first and the last of its chunks."""
    checksum: str
    """Of all but the head."""


@dataclass(frozen=True)
class Shard:
    """A shard that is open; its arrays are mapped, and stay so after the file is deleted."""

    path: Path
    info: ShardInfo
    tokens: Ids
    offsets: npt.NDArray[np.int64]

    def document(self, number: int) -> Ids:
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    def verify(self) -> None:
        """Reads all of it and compares it with its checksum."""
        digest = hashlib.blake2b(digest_size=8)
        with self.path.open("rb") as file:
            file.seek(HEAD.size)
            while data := file.read(1 << 20):
                digest.update(data)
        if digest.hexdigest() != self.info.checksum:
            raise DataError(
                f"{self.path} is damaged: its bytes do not have their checksum; delete it and "
                "build it again"
            )


def open_shard(path: Path) -> Shard:
    """Maps a shard. Its head and its size are checked, its bytes only by `Shard.verify`."""
    with path.open("rb") as file:
        head = file.read(HEAD.size)
        size = os.fstat(file.fileno()).st_size
        num_documents, num_tokens, num_bad, max_token, width, note_bytes, checksum = _parse(
            head, path
        )
        offsets_at, note_at = _places(num_documents, num_tokens, width)
        if size != note_at + note_bytes:
            raise DataError(
                f"{path} is cut short or damaged: {size:,} bytes where its head says "
                f"{note_at + note_bytes:,}; delete it and build it again"
            )
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tokens = np.frombuffer(data, DTYPES[width], num_tokens, HEAD.size)
    offsets = np.frombuffer(data, "<i8", num_documents + 1, offsets_at)
    if offsets[0] != 0 or offsets[-1] != num_tokens:
        raise DataError(f"{path} is damaged: its documents do not cover its tokens")
    first, last = json.loads(data[note_at:])
    info = ShardInfo(
        num_documents, num_tokens, num_bad, max_token, DTYPES[width], (first, last), checksum
    )
    return Shard(path, info, tokens, offsets)


def read_counts(path: Path) -> tuple[int, int, int]:
    """Documents, tokens and bad documents of a shard, from its head alone."""
    with path.open("rb") as file:
        num_documents, num_tokens, num_bad, *_ = _parse(file.read(HEAD.size), path)
    return num_documents, num_tokens, num_bad


def write_shard(
    path: Path,
    documents: Iterable[Ids],
    dtype: str,
    chunks: tuple[str, str] = ("", ""),
    num_bad: Callable[[], int] = lambda: 0,
    beside: Path | None = None,
) -> ShardInfo:
    """Writes documents as they come; only their offsets are held in memory.

    `num_bad` is asked at the end. `beside` is where the file grows before it is published. Raises
    FileNotFoundError where somebody removed it meanwhile.
    """
    beside = beside or path.with_name(f"{path.name}.{os.getpid()}.part")
    width = np.dtype(dtype).itemsize
    assert dtype == DTYPES[width]
    try:
        with naming(beside), beside.open("wb") as file:
            file.write(bytes(HEAD.size))
            digest = hashlib.blake2b(digest_size=8)
            offsets, max_token = _write_tokens(_Tee(file, digest), documents, dtype)
            note = json.dumps(chunks).encode()
            for data in (_padding(offsets[-1] * width), offsets.astype("<i8").tobytes(), note):
                file.write(data)
                digest.update(data)
            info = ShardInfo(
                len(offsets) - 1, int(offsets[-1]), num_bad(), max_token, dtype, chunks,
                digest.hexdigest(),
            )  # fmt: skip
            file.seek(0)
            file.write(_head(info, width, len(note)))
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return info


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts the file's name into what the system says of writing to it, such as that the disk is
    full."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """A new name is safe only once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Tee:
    """Writes to a file and into a digest."""

    def __init__(self, file: BinaryIO, digest: hashlib.blake2b) -> None:
        self.file, self.digest = file, digest

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)


def _write_tokens(
    file: _Tee, documents: Iterable[Ids], dtype: str
) -> tuple[npt.NDArray[np.int64], int]:
    lengths, max_token = [0], -1
    limit = 1 << 8 * np.dtype(dtype).itemsize
    for batch in _batches(documents):
        ids = np.concatenate(batch)
        lengths.extend(map(len, batch))
        if ids.size:
            max_token = max(max_token, int(ids.max()))
            assert int(ids.min()) >= 0
            assert max_token < limit
        file.write(ids.astype(dtype).tobytes())
    return np.cumsum(np.asarray(lengths, np.int64)), max_token


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


def _places(num_documents: int, num_tokens: int, width: int) -> tuple[int, int]:
    """Where the offsets and the note begin."""
    offsets_at = HEAD.size + -(-num_tokens * width // 8) * 8
    return offsets_at, offsets_at + 8 * (num_documents + 1)


def _head(info: ShardInfo, width: int, note_bytes: int) -> bytes:
    fields = (
        MAGIC, FORMAT, width, info.num_documents, info.num_tokens, info.num_bad, info.max_token,
        note_bytes, bytes.fromhex(info.checksum),
    )  # fmt: skip
    return HEAD.pack(*fields, zlib.crc32(HEAD.pack(*fields, 0)))


def _parse(head: bytes, path: Path) -> tuple[int, int, int, int, int, int, str]:
    if len(head) < HEAD.size or not head.startswith(MAGIC):
        raise DataError(f"{path} is no token shard, or is cut short; delete it and build it again")
    fields = HEAD.unpack(head)
    if fields[1] != FORMAT:
        raise DataError(f"{path}: format {fields[1]}, this version reads {FORMAT}: build it again")
    if fields[-1] != zlib.crc32(HEAD.pack(*fields[:-1], 0)):
        raise DataError(f"{path} is damaged in its head; delete it and build it again")
    _, _, width, num_documents, num_tokens, num_bad, max_token, note_bytes, checksum, _ = fields
    return num_documents, num_tokens, num_bad, max_token, width, note_bytes, checksum.hex()
