"""Reads files as bytes, decompressed if necessary, and explains why one cannot be read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from overland.errors import DataError
from overland.plugins import need

SUFFIXES = (".gz", ".zst", ".zstd", ".xz", ".bz2")
READ_BYTES = 1 << 20
COMPRESSION = 3  # typical compression ratio of text under gzip and zstd
# Passed to zstd and xz at once: four bytes can expand to 128 KiB, and the output stays in memory.
FOLDED_BYTES = 1 << 12
# Memory limit for xz; files from `xz -9` need 65 MiB, and zstd's own limit is 128 MiB.
XZ_MEMORY = 256 << 20
# A compressed file that is read into memory whole may expand to this size, or to MOST_TIMES its own
# size if that is more. gzip shrinks zeros to a thousandth, and text to hardly less than a tenth.
MOST_UNFOLDED = 256 << 20
MOST_TIMES = 100


def is_compressed(file: str) -> bool:
    return file.lower().endswith(SUFFIXES)


def times_smaller(file: str) -> int:
    """Returns roughly how many times smaller a file is than its text."""
    return COMPRESSION if is_compressed(file) else 1


def bare_suffix(path: Path) -> str:
    """Returns `.jsonl` for A.JSONL.gz."""
    return (Path(path.stem) if is_compressed(path.name) else path).suffix.lower()


def open_bytes(path: Path) -> IO[bytes]:
    match path.suffix.lower():
        case ".gz":
            return io.BufferedReader(gzip.GzipFile(path, "rb"), READ_BYTES)
        case ".xz":
            return io.BufferedReader(_XzFile(path), READ_BYTES)
        case ".bz2":
            return io.BufferedReader(bz2.BZ2File(path), READ_BYTES)
        case ".zst" | ".zstd":
            return io.BufferedReader(_ZstdFile(path), READ_BYTES)
    return path.open("rb")


def read_whole(path: Path) -> bytes:
    """Reads all of a file, unless it expands to far more than its own size."""
    with open_bytes(path) as file:
        if not is_compressed(path.name):
            return file.read()
        most = most_unfolded(path.stat().st_size)
        data = bytearray()
        while piece := file.read(READ_BYTES):
            data += piece
            if len(data) > most:
                raise DataError(
                    f"{path} decompresses to more than {most:,} bytes, over {MOST_TIMES} times its "
                    "own size; if that is intended, decompress it first"
                )
    return bytes(data)


def most_unfolded(size: int) -> int:
    """Returns how many bytes a file of this size may expand to in memory."""
    return max(MOST_UNFOLDED, MOST_TIMES * size)


def decompress(data: bytes, method: str, path: Path, most: int) -> bytes:
    """Decompresses at most `most` + 1 bytes, however many there are."""
    openers: dict[str, Callable[[IO[bytes]], Any]] = {
        "zstd": lambda file: io.BufferedReader(_ZstdFile(path, file)),
        "gz": lambda file: gzip.GzipFile(fileobj=file),
        "gzip": lambda file: gzip.GzipFile(fileobj=file),
        "bz2": bz2.BZ2File,
    }
    if method in openers:
        with openers[method](io.BytesIO(data)) as file:
            opened: bytes = file.read(max(most, 0) + 1)
            return opened
    raise DataError(f"{path} is compressed with {method}; supported are zstd, gz and bz2")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns a failure to read a file into a DataError, which no policy for bad documents skips."""
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # or decompressed
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{path} cannot be read: {reason}") from None


class _Frames(io.RawIOBase):
    """Decompresses one frame after another. The libraries' own readers do not notice a truncated
    zstd file, and have no limit on the memory that an xz file takes."""

    padding = b""
    """Bytes allowed between frames, and after the last one."""

    def __init__(self, path: Path, file: IO[bytes] | None = None) -> None:
        self._file = file if file is not None else path.open("rb")
        self._frame: Any = None
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
                data = data.lstrip(self.padding) if self.padding else data
                if not data:
                    continue
                self._frame = self.begin()
            try:
                self._ready = memoryview(self._frame.decompress(data))
            except self.error as error:
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

    error: type[Exception]

    def begin(self) -> Any:
        """Returns a decompressor for the next frame."""
        raise NotImplementedError


class _ZstdFile(_Frames):
    def __init__(self, path: Path, file: IO[bytes] | None = None) -> None:
        self._zstd: Any = need("zstandard", f"{path}: zstd")
        self.error = self._zstd.ZstdError
        super().__init__(path, file)

    def begin(self) -> Any:
        return self._zstd.ZstdDecompressor().decompressobj()


class _XzFile(_Frames):
    padding = b"\0"
    error = lzma.LZMAError

    def begin(self) -> Any:
        return lzma.LZMADecompressor(memlimit=XZ_MEMORY)
