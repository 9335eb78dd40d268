"""The format of a shard, and how it is written and verified: the documents of consecutive chunks as
token ids or bytes in one file, each with the hash that `data.holdout` chooses by.

    head      64 bytes, see `HEAD`
    tokens    all documents concatenated, little-endian uint16 or uint32, or bytes; padded to
              8 bytes
    channels  further arrays with an element per token, each padded to 8 bytes
    offsets   int64, one more than documents: document i is tokens[offsets[i] : offsets[i + 1]]
    marks     uint64, a hash of each document, by which `data.holdout` chooses
    sums      uint64, a checksum of each block of tokens and channels
    note      JSON: the first and the last chunk, the channels and their types, and counts of
              documents that were left out or truncated

The head has a checksum of everything from the offsets on. A reader verifies that, and then only the
blocks that it reads: each of thousands of ranks reads few of them.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from overland.errors import DataError

MAGIC = b"OVLSHARD"
FORMAT = 3
# magic, format, bytes per token, documents, tokens, bad documents, largest id, bytes of the note,
# the first 8 bytes of the checksum, CRC-32 of everything before it
HEAD = struct.Struct("<8sHHQQQqIQQ")
BYTES = "|u1"
DTYPES = {1: BYTES, 2: "<u2", 4: "<u4"}
# A rank reads the whole block around each document. Larger ones cost more reading than the file
# system's own read-ahead; sums of smaller ones, which every rank reads, cost more than the tokens.
BLOCK_BYTES = 1 << 14
MARK_KEY = b"overland: held out or not"

Ids = npt.NDArray[np.generic]
TOKENS = "tokens"
"""The field with the ids, in the structured array of a document that has channels."""
WEIGHTS = "weights"
"""The channel with the loss weight of each token."""
ANSWERS = "answers"
"""The channel of pairs: which of the two answers a token belongs to."""
CHOSEN, REJECTED = 1, 2


class ShardInfo(NamedTuple):
    num_documents: int
    num_tokens: int
    num_bad: int
    """Bad documents that were skipped."""
    max_token: int
    """The largest id, or -1 without tokens."""
    checksum: int
    """Checksum of everything after tokens and channels."""
    counts: Mapping[str, int] = {}
    """How many documents were left out or truncated as requested, by what was done."""


@dataclass(frozen=True)
class Shard:
    """An open shard; its arrays are memory-mapped, and stay readable if the file is deleted."""

    path: Path
    info: ShardInfo
    tokens: Ids
    """Unverified, as are `channels`; `read` and `document` verify what they return."""
    offsets: npt.NDArray[np.int64]
    channels: Mapping[str, Ids]
    marks: npt.NDArray[np.uint64]
    """See `mark_of`."""
    data: mmap.mmap
    """The whole file."""
    places: Mapping[str, int]
    """Where tokens and channels begin in the file."""
    sums: npt.NDArray[np.uint64]
    index_at: int
    """Where the offsets begin; everything from there on is small."""
    is_verified: bytearray
    """Whether each block was verified."""

    def read(self, begin: int, end: int, channel: str = TOKENS) -> Ids:
        """Returns tokens [begin, end), or their values in a channel, once verified."""
        values = self.tokens if channel == TOKENS else self.channels[channel]
        at, width = self.places[channel] - HEAD.size, values.itemsize
        self._verify(at + begin * width, at + end * width)
        return values[begin:end]

    def document(self, number: int, channel: str = TOKENS) -> Ids:
        return self.read(int(self.offsets[number]), int(self.offsets[number + 1]), channel)

    def held_out(self, share: float) -> npt.NDArray[np.bool_]:
        """Returns which documents are held out, if this share of them is."""
        return self.marks < np.uint64(limit_of(share))

    def verify_index(self) -> None:
        """Verifies everything except tokens and channels."""
        with memoryview(self.data) as data:
            self._compare(_sum(data[self.index_at :]), self.info.checksum)

    def verify(self) -> None:
        """Verifies every byte after the head, which was verified when the file was opened."""
        self.verify_index()
        self._verify(0, len(self.sums) * BLOCK_BYTES)

    def _verify(self, begin: int, end: int) -> None:
        """Verifies the blocks that contain these bytes, counted from the end of the head."""
        for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            if self.is_verified[block]:
                continue
            first = HEAD.size + block * BLOCK_BYTES
            with memoryview(self.data) as data:
                found = _sum(data[first : min(first + BLOCK_BYTES, self.index_at)])
            self._compare(found, int(self.sums[block]))
            self.is_verified[block] = True

    def _compare(self, found: int, stored: int) -> None:
        if found != stored:
            raise _unusable(self.path, "is damaged: its checksum does not match")


def open_shard(path: Path) -> Shard:
    """Maps a shard into memory. This checks its head and size; `Shard` verifies its bytes."""
    with path.open("rb") as file:
        head = file.read(HEAD.size)
        size = os.fstat(file.fileno()).st_size
        info, width, note_bytes = _parse(head, path)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    channels, counts = _read_note(data[len(data) - note_bytes :], path)
    types = [DTYPES[width], *channels.values()]
    *places, index_at = _places(info.num_tokens, types)
    num_blocks = -(-(index_at - HEAD.size) // BLOCK_BYTES)
    marks_at = index_at + 8 * (info.num_documents + 1)
    sums_at = marks_at + 8 * info.num_documents
    end = sums_at + 8 * num_blocks + note_bytes
    if size != end:
        what = f"is truncated or damaged: it has {size:,} bytes, but its header says {end:,}"
        raise _unusable(path, what)
    tokens, *rest = (
        np.frombuffer(data, dtype, info.num_tokens, at)
        for dtype, at in zip(types, places, strict=True)
    )
    offsets = np.frombuffer(data, "<i8", info.num_documents + 1, index_at)
    if offsets[0] != 0 or offsets[-1] != info.num_tokens:
        raise DataError(f"{path} is damaged: its documents do not cover its tokens")
    marks = np.frombuffer(data, "<u8", info.num_documents, marks_at)
    sums = np.frombuffer(data, "<u8", num_blocks, sums_at)
    return Shard(
        path, info._replace(counts=counts), tokens, offsets,
        dict(zip(channels, rest, strict=True)), marks, data,
        dict(zip([TOKENS, *channels], places, strict=True)), sums, index_at,
        bytearray(num_blocks),
    )  # fmt: skip


def read_counts(path: Path) -> tuple[int, int, int]:
    """Reads the numbers of documents, tokens and bad documents of a shard from its head."""
    with path.open("rb") as file:
        info, _, _ = _parse(file.read(HEAD.size), path)
    return info.num_documents, info.num_tokens, info.num_bad


class ShardWriter:
    """Writes documents to a file as they come; only their offsets, marks and channels are held in
    memory. With `channels` (types by name), each document is a structured array that has them next
    to its `tokens`. `specials`: how many tokens at the beginning and end of each document are BOS
    and EOS."""

    def __init__(
        self,
        file: BinaryIO,
        dtype: str,
        channels: Mapping[str, str] | None = None,
        specials: tuple[int, int] = (0, 0),
    ) -> None:
        self.dtype, self.channels, self.specials = dtype, dict(channels or {}), specials
        self._file = file
        file.write(bytes(HEAD.size))
        self._blocks = _Blocks(file)
        self._lengths = [0]
        self._marks: list[int] = []
        self._max_token = -1
        self._kept: dict[str, list[bytes]] = {name: [] for name in self.channels}
        assert dtype == DTYPES[self.width]

    @property
    def width(self) -> int:
        return np.dtype(self.dtype).itemsize

    def add(self, documents: Sequence[Ids]) -> None:
        if not documents:
            return
        ids: npt.NDArray[Any] = np.concatenate(documents)
        self._lengths += map(len, documents)
        if self.channels:
            for name, type_ in self.channels.items():
                self._kept[name].append(ids[name].astype(type_).tobytes())
            ids = ids[TOKENS]
        if ids.size:
            self._max_token = max(self._max_token, int(ids.max()))
            assert int(ids.min()) >= 0
            assert self._max_token < 1 << 8 * self.width
        ids = ids.astype(self.dtype)
        ends = np.cumsum([0, *map(len, documents)]).tolist()
        self._marks += (mark_of(ids[a:b], self.specials) for a, b in pairwise(ends))
        self._blocks.write(ids.tobytes())

    def finish(
        self,
        chunks: tuple[str, str] = ("", ""),
        num_bad: int = 0,
        counts: Mapping[str, int] | None = None,
    ) -> ShardInfo:
        """Writes what comes after the tokens, and the head."""
        offsets = np.cumsum(np.asarray(self._lengths, np.int64))
        self._blocks.write(_padding(int(offsets[-1]) * self.width))
        for parts in self._kept.values():
            for part in parts:
                self._blocks.write(part)
            self._blocks.write(_padding(sum(map(len, parts))))
        counted = dict(sorted((counts or {}).items()))
        about: dict[str, Any] = {"chunks": chunks, "channels": self.channels}
        about |= {"counts": counted} if counted else {}
        note = json.dumps(about).encode()
        index = offsets.astype("<i8").tobytes() + np.array(self._marks, "<u8").tobytes()
        index += np.array(self._blocks.finished(), "<u8").tobytes() + note
        self._file.write(index)
        numbers = len(offsets) - 1, int(offsets[-1]), num_bad, self._max_token
        info = ShardInfo(*numbers, _sum(index), counted)
        self._file.seek(0)
        self._file.write(_head(info, self.width, len(note)))
        return info


def mark_of(ids: Ids, specials: tuple[int, int]) -> int:
    """Returns a keyed hash of a document's tokens, without BOS and EOS, whatever type they are
    stored in."""
    ids = ids[specials[0] : max(len(ids) - specials[1], 0)]
    return _sum(ids.astype(BYTES if ids.dtype == BYTES else "<u4").tobytes(), MARK_KEY)


def limit_of(share: float) -> int:
    """Returns the mark below which documents are held out."""
    return min(round(share * 2**64), 2**64 - 1)


def _sum(data: bytes | memoryview, key: bytes = b"") -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key).digest(), "little")


class _Blocks:
    """Writes to a file, and computes the checksum of each block."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._begun = file, b""
        self._sums: list[int] = []

    def write(self, data: bytes) -> None:
        self._file.write(data)
        data = self._begun + data
        whole = len(data) // BLOCK_BYTES * BLOCK_BYTES
        with memoryview(data) as view:
            starts = range(0, whole, BLOCK_BYTES)
            self._sums += [_sum(view[at : at + BLOCK_BYTES]) for at in starts]
        self._begun = data[whole:]

    def finished(self) -> list[int]:
        return [*self._sums, _sum(self._begun)] if self._begun else self._sums


def _padding(num_bytes: int) -> bytes:
    return bytes(-num_bytes % 8)


def _places(num_tokens: int, types: Iterable[str]) -> list[int]:
    """Returns the offsets of tokens, channels and document offsets in the file."""
    places = [HEAD.size]
    for one in types:
        num_bytes = num_tokens * np.dtype(one).itemsize
        places.append(places[-1] + num_bytes + len(_padding(num_bytes)))
    return places


def _read_note(data: bytes, path: Path) -> tuple[dict[str, str], dict[str, int]]:
    """Reads the types of the channels, and the counts."""
    try:
        note = json.loads(data)
        channels = {name: np.dtype(one).str for name, one in note["channels"].items()}
        return channels, dict(note.get("counts", {}))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _unusable(path, "is truncated or damaged: its end cannot be read") from None


def _head(info: ShardInfo, width: int, note_bytes: int) -> bytes:
    numbers = info.num_documents, info.num_tokens, info.num_bad, info.max_token
    fields = MAGIC, FORMAT, width, *numbers, note_bytes, info.checksum
    return HEAD.pack(*fields, zlib.crc32(HEAD.pack(*fields, 0)))


def _parse(head: bytes, path: Path) -> tuple[ShardInfo, int, int]:
    """Returns what a head says, the bytes of a token, and those of the note."""
    if len(head) < HEAD.size or not head.startswith(MAGIC):
        raise _unusable(path, "is not a token shard, or is truncated")
    *fields, check = HEAD.unpack(head)
    _, version, width, documents, tokens, bad, largest, note_bytes, checksum = fields
    if version != FORMAT:
        raise DataError(
            f"{path} has format {version}, but this version reads {FORMAT}: delete it and build "
            "it again"
        )
    if check != zlib.crc32(HEAD.pack(*fields, 0)):
        raise _unusable(path, "is damaged in its header")
    return ShardInfo(documents, tokens, bad, largest, checksum), width, note_bytes


def _unusable(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}; delete it and build it again")
