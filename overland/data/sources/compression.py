"""Files as bytes, whatever they are compressed with, and what goes wrong with them as sentences."""

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
from overland.packages import need

SUFFIXES = (".gz", ".zst", ".zstd", ".xz", ".bz2")
READ_BYTES = 1 << 20
COMPRESSION = 3  # by how much text shrinks under gzip and zstd
# Given to zstd and xz at once: four bytes can stand for 128 KiB, and what comes out is held.
FOLDED_BYTES = 1 << 12
# What an xz file may ask for; `xz -9` asks for 65 MiB, and zstd's own limit is 128 MiB.
XZ_MEMORY = 256 << 20
# What a compressed file that is held in memory whole may unfold to: this, or more if it is within
# so many times its own size. Zeros shrink to a thousandth under gzip, text hardly to a tenth.
MOST_UNFOLDED = 256 << 20
MOST_TIMES = 100


def is_compressed(file: str) -> bool:
    return file.lower().endswith(SUFFIXES)


def times_smaller(file: str) -> int:
    """About how much smaller text is than it was."""
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
    """Reads all of a file, unless it is a small one that unfolds to more than memory should
    hold."""
    with open_bytes(path) as file:
        if not is_compressed(path.name):
            return file.read()
        most = most_unfolded(path.stat().st_size)
        data = bytearray()
        while piece := file.read(READ_BYTES):
            data += piece
            if len(data) > most:
                raise DataError(
                    f"{path} unfolds to more than {most:,} bytes, over {MOST_TIMES} times its own "
                    "size; if that is meant, decompress it first"
                )
    return bytes(data)


def most_unfolded(size: int) -> int:
    """Returns how much a file of so many bytes may unfold to in memory."""
    return max(MOST_UNFOLDED, MOST_TIMES * size)


def decompress(data: bytes, method: str, path: Path, most: int) -> bytes:
    """Decompresses at most one byte more than `most`, however much there would be."""
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
    raise DataError(f"{path} is compressed with {method}; zstd, gz and bz2 can be read")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Explains why a file cannot be read: an error under every policy, not a bad document."""
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # of a compressed file
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{path} cannot be read: {reason}") from None


class _Frames(io.RawIOBase):
    """Decompresses frame after frame. The libraries' own readers take the end of a zstd file that
    was cut short for the end of the data, and have no limit to the memory that an xz file takes."""

    padding = b""
    """What may stand between frames, and after the last."""

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
                    raise EOFError("it is cut short in the middle of a compressed frame")
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
        """A decompressor for the next frame."""
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
