"""Arrays in `.npy`, `.npz` and `.safetensors` files: where each one is, and how it is read.

No code in a file is ever run, and a size that a header claims is checked against the file before it
is used.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from overland.data.sources.compression import reading
from overland.errors import DataError
from overland.words import any_of
from overland.world.records import record

ARRAY_SUFFIXES = (".npy", ".npz", ".safetensors")
WANTED = "pixel_values"  # the array to read from a file that has several
LONGEST_HEADER = 10_000  # .npy: NumPy's own limit, which it checks only after reading the header
LONGEST_INDEX = 1 << 20  # .safetensors: our limit; images need little, and every file's is read
LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip member: lengths of its name and extra field
SAFETENSORS = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4",
    "U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip

Values = npt.NDArray[Any]


@record
@dataclass(frozen=True)
class StoredArray:
    """An array in a file: contiguous values from `offset` on, in the file itself or in a compressed
    `member` of a zip."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    member: str = ""

    @property
    def num_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * prod(self.shape)


def find_array(path: Path) -> StoredArray:
    """Locates the array in a file: the only one, or the one called pixel_values."""
    with reading(path):
        size = path.stat().st_size
        with path.open("rb") as file:
            try:
                if path.suffix == ".npy":
                    array = _npy(file, path, size)
                elif path.suffix == ".npz":
                    array = _npz(file, path)
                else:
                    array = _safetensors(file, path, size)
            except (ValueError, TypeError, KeyError, SyntaxError, AttributeError, struct.error,
                    RecursionError, MemoryError, OverflowError, zipfile.BadZipFile,
                    RuntimeError, EOFError, zlib.error) as error:  # fmt: skip
                # A header is untrusted text, and parsing it can fail in many ways.
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                raise DataError(f"{path} is not an array, or is truncated: {reason}") from None
    if not array.member and array.offset + array.num_bytes > size:
        raise DataError(
            f"{path} is truncated: {' × '.join(map(str, array.shape))} {np.dtype(array.dtype)} "
            f"values need {array.offset + array.num_bytes:,} bytes, but the file has {size:,}"
        )
    return array


def read_array(path: Path, array: StoredArray, into: Values, first: int = 0) -> None:
    """Fills `into`, which must be contiguous and have the array's dtype, with the array's bytes
    from `first` on."""
    view = into.reshape(-1).view(np.uint8).data
    with reading(path):
        if array.member:
            _read_member(path, array, view, first)
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            at = array.offset + first
            while view:
                count = os.preadv(descriptor, [view], at)
                if not count:
                    raise DataError(f"{path} is truncated: it ends at byte {at:,}")
                view, at = view[count:], at + count
        finally:
            os.close(descriptor)


def _read_member(path: Path, array: StoredArray, view: memoryview, first: int) -> None:
    """Reads a compressed array, which has to be decompressed from its first byte on."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(array.member) as member:
            member.seek(array.offset + first)
            while view:
                data = member.read(min(len(view), 1 << 20))
                if not data:
                    raise DataError(f"{path} is truncated: {array.member} ends too early")
                view[: len(data)] = data
                view = view[len(data) :]
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise DataError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from None


def _npy(file: IO[bytes], path: Path, size: int) -> StoredArray:
    """The array of a .npy file, or of a .npy member of a zip."""
    if not size:
        raise DataError(f"{path} is empty")
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"unsupported format version {version}")
    length = file.read(2 if version == (1, 0) else 4)
    header = int.from_bytes(length, "little")
    if header > LONGEST_HEADER:
        raise DataError(
            f"{path} is not an array: its header has more than {LONGEST_HEADER:,} bytes"
        )
    whole = io.BytesIO(length + file.read(header))
    read = np.lib.format.read_array_header_1_0
    if version == (2, 0):
        read = np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read(whole, max_header_size=LONGEST_HEADER)
    if dtype.hasobject:
        raise DataError(
            f"{path} contains Python objects (a pickle), which are not read: save only numbers"
        )
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise DataError(f"{path} contains {dtype} values; expected integers or floats")
    if by_columns and len(shape) > 1:
        raise DataError(
            f"{path} is in Fortran order (by columns): save np.ascontiguousarray(array) instead"
        )
    return StoredArray(dtype.str, _checked(shape, path), 8 + len(length) + header)


def _npz(file: IO[bytes], path: Path) -> StoredArray:
    with zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        info = members[_chosen(list(members), path)]
        with archive.open(info) as member:
            array = _npy(member, path, info.file_size)
        if array.offset + array.num_bytes > info.file_size:
            raise DataError(
                f"{path} is truncated: {info.filename} has {info.file_size:,} bytes, but its array "
                f"needs {array.offset + array.num_bytes:,}"
            )
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            return StoredArray(array.dtype, array.shape, array.offset, info.filename)
    file.seek(info.header_offset)
    begin = sum(LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))) + LOCAL_HEADER.size
    return StoredArray(array.dtype, array.shape, info.header_offset + begin + array.offset)


def _safetensors(file: IO[bytes], path: Path, size: int) -> StoredArray:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, LONGEST_INDEX):
        raise DataError(f"{path} is not a safetensors file: its header claims {length:,} bytes")
    header = json.loads(file.read(length).decode())
    tensors = {name: one for name, one in header.items() if name != "__metadata__"}
    name = _chosen(list(tensors), path)
    kind, (begin, end) = tensors[name]["dtype"], tensors[name]["data_offsets"]
    if kind not in SAFETENSORS:
        known = ", ".join(SAFETENSORS)
        raise DataError(f"{path} stores {name} as {kind!r:.20}; supported for images: {known}")
    shape = _checked(tensors[name]["shape"], path)
    array = StoredArray(SAFETENSORS[kind], shape, 8 + length + _natural(begin))
    if _natural(end) - begin != array.num_bytes:
        raise DataError(
            f"{path} has {end - begin:,} bytes for {name}; its shape needs {array.num_bytes:,}"
        )
    return array


def _chosen(names: list[str], path: Path) -> str:
    if not names:
        raise DataError(f"{path} contains no array")
    if len(names) == 1:
        return names[0]
    if WANTED in names:
        return WANTED
    shown = any_of([repr(name)[:40] for name in names[:5]], "and")
    raise DataError(
        f"{path} contains several arrays ({shown}): rename the one with the images to {WANTED}"
    )


def _checked(shape: Any, path: Path) -> tuple[int, ...]:
    shape = tuple(_natural(length) for length in shape)
    if not all(shape):
        raise DataError(f"{path} is empty: its array has shape {shape}")
    return shape


def _natural(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise ValueError(f"{number!r:.40} is not a valid size")
    return number
