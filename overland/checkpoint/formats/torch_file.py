"""Files of `torch.save`, opened without running or loading them.

Such a file is a zip of stored (not compressed) records: `data.pkl`, and one record of raw bytes
for each storage. The pickle is read by our own machine, and tensors stay in the file.
"""

from __future__ import annotations

import struct
import zipfile
from io import RawIOBase
from pathlib import Path
from typing import Any

from overland.checkpoint.formats.known import KNOWN, Storage, StorageType
from overland.checkpoint.formats.lazy import Stored, counter
from overland.checkpoint.pickles import load_pickle
from overland.errors import CheckpointError

# A pickle describes tensors, a few hundred bytes each; so much of it is an attack or a mistake.
MAX_PICKLE_BYTES = 2**28


def read_torch_file(path: Path, offset: int = 0, length: int | None = None) -> Any:
    """What was saved, with `Stored` in place of tensors. With an offset, a file within a file."""
    size = path.stat().st_size
    length = size - offset if length is None else length
    if min(offset, length) < 0 or offset + length > size:
        raise CheckpointError(
            f"{path} has {size} bytes, but {length} from byte {offset} on are asked of it"
        )
    with path.open("rb") as file:
        records = _records(_Window(file, offset, length), path, length)
        (root,) = (name[: -len("data.pkl")] for name in records if name.endswith("/data.pkl"))
        start, count = records[f"{root}data.pkl"]
        if count > MAX_PICKLE_BYTES:
            raise CheckpointError(f"{path} has a pickle of {count} bytes, which is refused")
        _check_byte_order(file, path, offset, records.get(f"{root}byteorder"))
        file.seek(offset + start)
        pickled = file.read(count)
    counter()(count)

    def storage(key: Any) -> Storage:
        if not isinstance(key, tuple) or len(key) not in (5, 6):
            raise TypeError
        kind, type_, name, _device, numel = key[:5]
        if kind != "storage" or not isinstance(type_, StorageType) or type(numel) is not int:
            raise TypeError
        # Only a short string is looked up: records are numbered, and a file may ask many times.
        if type(name) is not str or len(name) > 128:
            raise TypeError
        place = records.get(f"{root}data/{name}")
        if place is None:
            raise CheckpointError(f"{path} lacks record data/{name}, which its tensors need")
        if numel < 0 or numel * type_.dtype.itemsize > place[1]:
            raise CheckpointError(
                f"{path} says that record data/{name} has {numel} elements, but it has "
                f"{place[1]} bytes"
            )
        return Storage(path, offset + place[0], place[1], type_.dtype)

    return load_pickle(pickled, str(path), KNOWN, storage)


def tensors_in(saved: Any, path: Path) -> dict[str, Stored]:
    """The tensors of a state dict by name."""
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path} holds a {type(saved).__name__}, expected a state dict")
    return {str(name): value for name, value in saved.items() if isinstance(value, Stored)}


def scalar(value: Any) -> Any:
    """A number, whether it was saved as one or as a tensor with one element."""
    if isinstance(value, Stored) and value.numel == 1:
        return value.load().item()
    return value


def _records(window: _Window, path: Path, length: int) -> dict[str, tuple[int, int]]:
    """Record name → (first byte, number of bytes), none compressed, none over another."""
    if length >= 2 and window.peek(2) != b"PK":
        raise CheckpointError(
            f"{path} is not a zip file: it was saved by torch before 1.6 or is damaged. Load it "
            "with torch.load(weights_only=True) where it came from, and save it again"
        )
    try:
        with zipfile.ZipFile(window) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
            records = {entry.filename: _place(window, entry, path) for entry in entries}
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"{path} cannot be read as a torch file: {error}") from None
    end = 0
    for name, (start, count) in records.items():
        if start < end or start + count > length:
            raise CheckpointError(f"{path} has record {name} over another or beyond its end")
        end = start + count
    if len(records) != len(entries) or sum(n.endswith("/data.pkl") for n in records) != 1:
        raise CheckpointError(f"{path} is a zip file, but not one of torch.save")
    return records


def _place(window: _Window, entry: zipfile.ZipInfo, path: Path) -> tuple[int, int]:
    """A record begins after its own header, whose length the zip's index does not tell."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 0x1:
        raise CheckpointError(
            f"{path} has compressed record {entry.filename}; torch.save never compresses, and "
            "what it would grow to is unknown"
        )
    if entry.compress_size != entry.file_size:
        raise CheckpointError(f"{path} states two sizes for record {entry.filename}")
    window.seek(entry.header_offset)
    header = window.read(30)
    if header is None or len(header) != 30 or header[:4] != b"PK\x03\x04":
        raise CheckpointError(f"{path} has no record {entry.filename} where its index says")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    return entry.header_offset + 30 + name_length + extra_length, entry.file_size


def _check_byte_order(file: Any, path: Path, offset: int, place: tuple[int, int] | None) -> None:
    if place is None:
        return
    file.seek(offset + place[0])
    if file.read(min(place[1], 16)) != b"little":
        raise CheckpointError(f"{path} was saved on a big-endian machine, which is not supported")


class _Window(RawIOBase):
    """A range of a file as a file of its own, for zipfile."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self.file, self.offset, self.length, self.place = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, place: int, whence: int = 0) -> int:
        self.place = max(0, place + (0, self.place, self.length)[whence])
        return self.place

    def read(self, count: int | None = -1) -> bytes:
        left = max(0, self.length - self.place)
        count = left if count is None or count < 0 else min(count, left)
        self.file.seek(self.offset + self.place)
        data: bytes = self.file.read(count)
        self.place += len(data)
        return data

    def peek(self, count: int) -> bytes:
        self.seek(0)
        data = self.read(count)
        self.seek(0)
        return data
