"""Reads files as bytes, decompressing gzip, zstd, xz and bz2 within limits of memory, decodes text,
and explains why a file cannot be read.
"""

from __future__ import annotations

import bz2
import io
import lzma
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from overland.errors import DataError
from overland.plugins import need

SUFFIXES = (".gz", ".zst", ".zstd", ".xz", ".bz2")
READ_BYTES = 1 << 20
COMPRESSION = 3  # typical compression ratio of text under gzip and zstd
# Passed to a library at once: four bytes of zstd or xz can expand to 128 KiB, which stay in memory.
FOLDED_BYTES = 1 << 12
# Memory limit for xz; files from `xz -9` need 65 MiB, and zstd's own limit is 128 MiB.
XZ_MEMORY = 256 << 20
# A compressed file that is read into memory whole may expand to this size, or to MOST_TIMES its own
# size if that is more. gzip shrinks zeros to a thousandth, and text to hardly less than a tenth.
MOST_UNFOLDED = 256 << 20
MOST_TIMES = 100
# What is read to estimate how many times longer the text of a file is.
HEAD_BYTES = 1 << 20
UNFOLDED_BYTES = 64 << 20


def is_compressed(file: str) -> bool:
    return file.lower().endswith(SUFFIXES)


def times_smaller(file: str) -> int:
    """Returns roughly how many times smaller a file is than its text."""
    return COMPRESSION if is_compressed(file) else 1


def measured_times_smaller(path: Path) -> int:
    """Estimates it from the beginning of a compressed file: a power of two. The chunks of a file
    follow from it, so it counts what it always did: all frames of zstd, the first one of others."""
    with reading(path), path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    begin, rest, num_bytes = _decompressor(path), head, 0
    frame = begin()
    with suppress(Exception):  # reading will report it
        while rest and num_bytes < UNFOLDED_BYTES:
            num_bytes += len(frame.decompress(rest[:FOLDED_BYTES]))
            rest = rest[FOLDED_BYTES:]
            if frame.eof:
                rest = frame.unused_data + rest
                if "zst" not in path.suffix.lower():
                    break
                frame = begin()
    return 2 ** max(0, round(math.log2(num_bytes / (len(head) - len(rest))))) if num_bytes else 1


def bare_suffix(path: Path) -> str:
    """Returns `.jsonl` for A.JSONL.gz."""
    return (Path(path.stem) if is_compressed(path.name) else path).suffix.lower()


def open_bytes(path: Path) -> IO[bytes]:
    file = path.open("rb")
    return decompressed(file, path) if is_compressed(path.name) else file


def read_whole(path: Path) -> bytes:
    """Reads all of a file, unless it expands to far more than its own size."""
    with open_bytes(path) as file:
        if not is_compressed(path.name):
            return file.read()
        most = most_unfolded(path.stat().st_size)
        data = file.read(most + 1)
    if len(data) > most:
        raise DataError(
            f"{path} decompresses to more than {most:,} bytes, over {MOST_TIMES} times its own "
            "size; if that is intended, decompress it first"
        )
    return data


def decode(data: bytes, where: object, bad: Callable[[str], None]) -> str | None:
    """Returns the text of a document, or None if it is a bad one, which `bad` is told."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        bad(f"{where}: expected UTF-8 text, got {error.reason} at byte {error.start:,}")
        return None


def most_unfolded(size: int) -> int:
    """Returns how many bytes a file of this size may expand to in memory."""
    return max(MOST_UNFOLDED, MOST_TIMES * size)


def decompress(data: bytes, method: str, path: Path, most: int) -> bytes:
    """Decompresses at most `most` + 1 bytes, however many there are."""
    if method not in ("zstd", "gz", "gzip", "bz2"):
        raise DataError(f"{path} is compressed with {method}; supported are zstd, gz and bz2")
    return decompressed(io.BytesIO(data), path, method).read(max(most, 0) + 1)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns a failure to read a file into a DataError, which no policy for bad documents skips."""
    try:
        yield
    except (OSError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{path} cannot be read: {reason}") from None


def decompressed(file: IO[bytes], path: Path, method: str | None = None) -> io.BufferedReader:
    """Returns the text of an open file, compressed with this method or as its name says."""
    return io.BufferedReader(_Frames(file, _decompressor(path, method)), READ_BYTES)


def _decompressor(path: Path, method: str | None = None) -> Callable[[], Any]:
    """Returns a function that makes a decompressor for a frame."""
    match method or path.suffix.lower().removeprefix("."):
        case "gz" | "gzip":
            return lambda: zlib.decompressobj(wbits=31)  # with gzip's header and checksum
        case "bz2":
            return bz2.BZ2Decompressor
        case "xz":
            return lambda: lzma.LZMADecompressor(memlimit=XZ_MEMORY)
    zstd: Any = need("zstandard", f"{path}: zstd")
    return lambda: zstd.ZstdDecompressor().decompressobj()


class _Frames(io.RawIOBase):
    """Decompresses one frame after another. The libraries' own readers do not notice a truncated
    zstd file, have no limit on the memory that an xz file takes, and ignore what follows the last
    frame of a bz2 file."""

    def __init__(self, file: IO[bytes], begin: Callable[[], Any]) -> None:
        self._file, self._begin = file, begin
        # An empty file is one of no frames, except that bz2 has at least one.
        self._frame: Any = begin() if begin is bz2.BZ2Decompressor else None
        self._rest = b""  # compressed
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._rest or self._file.read(FOLDED_BYTES)
            self._rest = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("it is truncated in the middle of a compressed frame")
                return 0
            if self._frame is None:
                data = data.lstrip(b"\0")  # gzip and xz allow padding after a frame
                if not data:
                    continue
                self._frame = self._begin()
            try:
                self._ready = memoryview(self._frame.decompress(data))
            except Exception as error:  # each library has its own
                raise EOFError(str(error)) from None
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
