"""Opens files of `torch.save` without running or loading them, and writes them tensor by tensor.

Such a file is a zip of stored (not compressed) records: `data.pkl`, and one record of raw bytes
for each storage. The pickle is read by our own machine, and tensors stay in the file. `torch.save`
needs everything in memory; here the object is pickled first, with a reference in place of each
tensor (as torch does), and then the tensors follow as records, one at a time.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from overland.apps.convert.formats.lazy import Stored
from overland.apps.convert.formats.pickles import load_pickle
from overland.apps.convert.formats.safe_globals import (
    SAFE_GLOBALS,
    STORAGE_NAMES,
    Storage,
    StorageType,
)
from overland.checkpoint.lazy import Lazy, counter
from overland.checkpoint.write import bytes_of
from overland.errors import CheckpointError

# A pickle describes tensors in a few hundred bytes each; a larger one is an attack or a mistake.
MAX_PICKLE_BYTES = 2**28
# torch aligns records so that a mapped file can be used as tensors directly.
ALIGNMENT = 64


def read_torch_file(path: Path, offset: int = 0, length: int | None = None) -> Any:
    """Returns what was saved, with `Stored` in place of tensors. `offset` and `length` select a
    file within a file."""
    size = path.stat().st_size
    length = size - offset if length is None else length
    if min(offset, length) < 0 or offset + length > size:
        raise CheckpointError(
            f"{path} has {size} bytes, but {length} bytes from byte {offset} on are needed"
        )
    with path.open("rb") as file:
        records = _records(_Part(file, offset, length), path, length)
        (root,) = (name[: -len("data.pkl")] for name in records if name.endswith("/data.pkl"))
        start, count = records[f"{root}data.pkl"]
        if count > MAX_PICKLE_BYTES:
            raise CheckpointError(
                f"{path} has a pickle of {count} bytes, which is too large to be safe"
            )
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
        # Only short strings are looked up: records are numbered, and a file may refer to many.
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

    return load_pickle(pickled, str(path), SAFE_GLOBALS, storage)


def tensors_of(file: Path) -> dict[str, Lazy]:
    """Returns all tensors of a file that torch.save has written."""
    return dict(tensors_in(read_torch_file(file), file))


def tensors_in(saved: Any, path: Path) -> dict[str, Stored]:
    """Returns the tensors of a state dict by name."""
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path} holds a {type(saved).__name__}, expected a state dict")
    return {str(name): value for name, value in saved.items() if isinstance(value, Stored)}


def scalar(value: Any) -> Any:
    """Returns a number, whether it was saved as such or as a tensor with one element."""
    if isinstance(value, Stored) and value.numel == 1:
        return value.load().item()
    return value


def _records(window: _Part, path: Path, length: int) -> dict[str, tuple[int, int]]:
    """Returns (first byte, number of bytes) by record name; raises if records are compressed or
    overlap."""
    is_zip = window.read(2) == b"PK"
    window.seek(0)
    if length >= 2 and not is_zip:
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
            raise CheckpointError(f"{path} has record {name} overlapping another or beyond its end")
        end = start + count
    if len(records) != len(entries) or sum(n.endswith("/data.pkl") for n in records) != 1:
        raise CheckpointError(f"{path} is a zip file, but was not written by torch.save")
    return records


def _place(window: _Part, entry: zipfile.ZipInfo, path: Path) -> tuple[int, int]:
    """Returns where a record begins, after its own header (whose length is not in the zip's index),
    and its size."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 0x1:
        raise CheckpointError(
            f"{path} has a compressed record, {entry.filename}, which torch.save never writes; it "
            "is refused because its uncompressed size is unknown"
        )
    if entry.compress_size != entry.file_size:
        raise CheckpointError(f"{path} gives two different sizes for record {entry.filename}")
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


class _Part:
    """A range of a file, with what zipfile needs of a file: offsets in a zip count from its
    beginning. Without a length, it is all that follows."""

    def __init__(self, file: Any, offset: int, length: int = 0) -> None:
        self.file, self.offset, self.length, self.place = file, offset, length, 0

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

    def write(self, data: Any) -> int:
        self.file.seek(self.offset + self.place)
        written: int = self.file.write(data)
        self.place += written
        return written

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        """Keeps the file open, since more may follow."""


def write_torch_file(file: BinaryIO, saved: Any, root: str = "archive") -> int:
    """Writes an object, with `Lazy` in place of tensors, at the file's current position; returns
    its length. The same `Lazy` twice becomes one storage, as with tied weights."""
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.dump(saved)
    target = _Part(file, file.tell())
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        _write(archive, target, f"{root}/data.pkl", text.getbuffer())
        _write(archive, target, f"{root}/byteorder", b"little")
        for number, lazy in enumerate(pickler.tensors):
            _write(archive, target, f"{root}/data/{number}", bytes_of(lazy.load()))
        _write(archive, target, f"{root}/version", b"3\n")
    return target.tell()


class _Reference(NamedTuple):
    """Stands for the storage of a tensor while its object is pickled."""

    number: int
    lazy: Lazy


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[Lazy] = []

    def reducer_override(self, item: Any) -> Any:
        if not isinstance(item, Lazy):
            return NotImplemented
        reference = _Reference(len(self.tensors), item)
        self.tensors.append(item)
        stride = torch.empty(item.shape, device="meta").stride()
        args: tuple[Any, ...] = (reference, 0, item.shape, stride, False, OrderedDict())
        if item.dtype in STORAGE_NAMES:
            return torch._utils._rebuild_tensor_v2, args
        return torch._utils._rebuild_tensor_v3, (*args, item.dtype)

    def persistent_id(self, item: Any) -> Any:
        if not isinstance(item, _Reference):
            return None
        lazy = item.lazy
        if lazy.dtype in STORAGE_NAMES:
            kind, count = getattr(torch, STORAGE_NAMES[lazy.dtype]), lazy.numel
        else:
            kind, count = torch.UntypedStorage, lazy.nbytes
        return ("storage", kind, str(item.number), "cpu", count)


def _write(archive: zipfile.ZipFile, target: _Part, name: str, data: Any) -> None:
    entry = zipfile.ZipInfo(name)
    # 30 bytes of header, 20 for the 64-bit sizes, which are always present, 4 before the padding.
    used = target.tell() + 30 + len(name.encode()) + 20 + 4
    padding = -used % ALIGNMENT
    entry.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(entry, "w", force_zip64=True) as record:
        record.write(data)
