"""Files that `torch.load(weights_only=True)` reads, written tensor by tensor.

`torch.save` wants everything in memory. Here the object is pickled first, with a reference in
place of each tensor (which is what torch does, too), and then the tensors follow as records of a
zip, one at a time.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from typing import Any, BinaryIO

import torch

from overland.checkpoint.formats.known import STORAGE_NAMES
from overland.checkpoint.formats.lazy import Lazy, memory

# torch aligns records so that a mapped file can be used as tensors directly.
ALIGNMENT = 64


def write_torch_file(file: BinaryIO, saved: Any, root: str = "archive") -> int:
    """Writes at the file's place an object with `Lazy` in place of tensors; returns its length.
    The same `Lazy` twice is one storage, as with tied weights."""
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.dump(saved)
    target = _From(file)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        _write(archive, target, f"{root}/data.pkl", text.getbuffer())
        _write(archive, target, f"{root}/byteorder", b"little")
        for number, lazy in enumerate(pickler.tensors):
            _write(archive, target, f"{root}/data/{number}", memory(lazy.load()))
        _write(archive, target, f"{root}/version", b"3\n")
    return target.tell()


class _Reference:
    """Stands for the storage of a tensor while its object is pickled."""

    def __init__(self, number: int, lazy: Lazy) -> None:
        self.number, self.lazy = number, lazy


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


def _write(archive: zipfile.ZipFile, target: _From, name: str, data: Any) -> None:
    entry = zipfile.ZipInfo(name)
    # 30 bytes of header, 20 for the 64-bit sizes that are always there, 4 before the padding.
    used = target.tell() + 30 + len(name.encode()) + 20 + 4
    padding = -used % ALIGNMENT
    entry.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(entry, "w", force_zip64=True) as record:
        record.write(data)


class _From(io.RawIOBase):
    """A file seen from its current place on: a zip counts from its own beginning."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.start = file, file.tell()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.file.tell() - self.start

    def seek(self, place: int, whence: int = 0) -> int:
        return self.file.seek(place + (self.start if whence == 0 else 0), whence) - self.start

    def write(self, data: Any) -> int:
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        """The file stays open: more may follow."""
