"""Images in files: a CSV that lists `.npy`, `.npz` and `.safetensors` files, and their arrays.

    path
    run-12/0001.npy
    run-12/all.safetensors

Paths are absolute or relative to the list; the header is optional. A file holds one image, H × W
or C × H × W, or many, with one more leading dimension. No code in a file is ever run, and a size
that a header claims is checked against the file before it is used.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import os
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from overland.data.sources.compression import reading
from overland.data.sources.source import Arrays, FileSource, Kind
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
LOOKED_AT = 64  # rows inspected to tell a list of files from a table of texts
SCANNERS = 16  # threads, since scanning mostly waits for the file system
MARKED_BYTES = 4096  # hashed at the beginning and at the end of each file
MOST_CHANNELS = 4  # no image is this narrow: such a last dimension holds channels
PATH_NAMES = ("path", "file", "filename", "file_path", "file_name")

Shape = tuple[int, int, int]
Values = npt.NDArray[Any]


@record
class ArrayList(FileSource):
    """Images, each C × H × W, accessed by number. All have the same dtype; smaller ones are
    centered and padded with zeros."""

    format = "images"
    kind: Kind = "arrays"

    def __init__(
        self,
        path: Path,
        column: str | None = None,
        skip_bad: bool = False,
        channels: int | None = None,
        pad: Sequence[int] | None = None,
    ) -> None:
        """`channels`: the channels of an image, if known; they tell an image with several channels
        from several images. `pad`: the height and width that all images are padded to."""
        files = listed_files(path, column)
        super().__init__(path.parent, files, skip_bad)
        self.list = path
        found = self._scan()
        self.files = list(found)
        if not found:
            raise DataError(f"{path} lists no readable file: {self.num_bad:,} were skipped")
        self.stored = [array for array, _ in found.values()]
        self._marks = [mark for _, mark in found.values()]
        self.shapes: list[Shape] = []
        """The shape of one image, for each file."""
        counts = []
        for file, array in zip(self.files, self.stored, strict=True):
            count, shape = images_in(array.shape, channels, root=path.parent / file)
            self.shapes.append(shape)
            counts.append(count)
        self.ends = np.cumsum(counts)
        self.starts = self.ends - counts
        self.dtype_of_all = self._one_type()
        self.shape = self._one_shape(pad)
        self.fields = {WANTED: (self.dtype_of_all, self.shape)}

    def __len__(self) -> int:
        """The number of images."""
        return int(self.ends[-1])

    def fill(self, number: int, into: Values) -> None:
        """Reads an image into an array of this source's type and shape."""
        which = int(np.searchsorted(self.ends, number, side="right"))
        array, (channels, height, width) = self.stored[which], self.shapes[which]
        dtype = np.dtype(array.dtype)
        size = channels * height * width * dtype.itemsize
        begin = (number - int(self.starts[which])) * size
        path = self.root / self.files[which]
        if self.shapes[which] == self.shape and dtype == into.dtype and into.flags.c_contiguous:
            read_array(path, array, into, begin)
            return
        image = np.empty((channels, height, width), dtype)
        read_array(path, array, image, begin)
        into[...] = 0
        top, left = (self.shape[1] - height) // 2, (self.shape[2] - width) // 2
        into[:, top : top + height, left : left + width] = image

    def chunks(self) -> list[str]:
        return list(self.files)

    def num_documents(self, chunk: str) -> int:
        which = self.files.index(chunk)
        return int(self.ends[which] - self.starts[which])

    def read(self, chunk: str) -> Iterator[Arrays]:
        which = self.files.index(chunk)
        for number in range(int(self.starts[which]), int(self.ends[which])):
            image = np.empty(self.shape, self.dtype_of_all)
            self.fill(number, image)
            yield {WANTED: image}

    def digest(self) -> str:
        """Returns a digest of the order of the images and of each file's name, size, beginning and
        end; `overland prove data` compares all bytes."""
        parts = (*self.files, *self._marks, str(self.shape))
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    def _scan(self) -> dict[str, tuple[StoredArray, str]]:
        """Reads the header of every file."""

        def look(file: str) -> tuple[StoredArray, str] | DataError:
            try:
                return find_array(self.root / file), _mark(self.root / file)
            except DataError as error:
                return error

        found: dict[str, tuple[StoredArray, str]] = {}
        with ThreadPoolExecutor(SCANNERS) as pool:
            for file, one in zip(self.files, pool.map(look, self.files), strict=True):
                if isinstance(one, DataError):
                    self.bad(str(one))
                else:
                    found[file] = one
        return found

    def _one_type(self) -> str:
        first = np.dtype(self.stored[0].dtype).newbyteorder("<")
        for file, array in zip(self.files, self.stored, strict=True):
            if np.dtype(array.dtype).newbyteorder("<") != first:
                raise DataError(
                    f"{self.root / file} contains {np.dtype(array.dtype)} but {self.files[0]} "
                    f"contains {first}: all images in {self.list} must have the same dtype"
                )
        return first.str

    def _one_shape(self, pad: Sequence[int] | None) -> Shape:
        """The shape that every image is padded to."""
        height, width = pad or self.shapes[0][1:]
        expected = (self.shapes[0][0], int(height), int(width))
        for file, shape in zip(self.files, self.shapes, strict=True):
            if pad is None and shape != expected:
                raise DataError(
                    f"{self.root / file} has an image of {_words(shape)}, but {self.files[0]} has "
                    f"{_words(expected)}: set images.pad to the height and width of the largest"
                )
            if shape[0] != expected[0] or shape[1] > expected[1] or shape[2] > expected[2]:
                raise DataError(
                    f"{self.root / file} has an image of {_words(shape)}, which cannot be padded "
                    f"to {_words(expected)}: increase images.pad, or remove the file from the list"
                )
        return expected


def images_in(shape: tuple[int, ...], channels: int | None, root: Path) -> tuple[int, Shape]:
    """Returns the number of images in an array, and the shape of each."""
    if len(shape) in (3, 4) and shape[-1] <= MOST_CHANNELS < shape[-2]:
        raise DataError(
            f"{root} has an array of {_words(shape)}, which looks channels-last: save it "
            "channels-first, with np.moveaxis(array, -1, -3)"
        )
    if len(shape) == 2:
        return 1, (1, *shape)
    if len(shape) == 3:
        return (1, shape) if channels == shape[0] != 1 else (shape[0], (1, *shape[1:]))
    if len(shape) == 4:
        return shape[0], shape[1:]
    raise DataError(
        f"{root} has an array of {_words(shape)}; expected H × W or C × H × W, with one more "
        "leading dimension for many images"
    )


def is_array_list(path: Path) -> bool:
    """Whether a CSV lists array files, judging by its first rows."""
    try:
        return bool(_path_column(path, None))
    except (DataError, OSError):
        return False


def listed_files(path: Path, column: str | None) -> list[str]:
    """The files of a list, in order."""
    which = _path_column(path, column)
    if which is None:
        raise DataError(f"{path} lists no {any_of(list(ARRAY_SUFFIXES))} files")
    number, has_header = which
    files: list[str] = []
    for line, row in itertools.islice(_rows(path), int(has_header), None):
        name = row[number].strip() if number < len(row) else ""
        if not name.endswith(ARRAY_SUFFIXES):
            raise DataError(
                f"{path}:{line}: expected a {any_of(list(ARRAY_SUFFIXES))} file, got {name!r:.80}"
            )
        files.append(os.path.expanduser(name))
    if len(set(files)) < len(files):
        ((twice, _),) = Counter(files).most_common(1)
        raise DataError(f"{path} lists {twice} more than once: each epoch would repeat its images")
    return files


def _path_column(path: Path, column: str | None) -> tuple[int, bool] | None:
    """Returns the index of the column that names files, and whether the first row is a header."""
    rows = [row for _, row in itertools.islice(_rows(path), LOOKED_AT)]
    if not rows:
        raise DataError(f"{path} is empty: it lists no files")
    header = [name.strip().lower() for name in rows[0]]
    if column is not None:
        if column.lower() not in header:
            raise DataError(f"{path} has no column {column!r}; it has {', '.join(rows[0])}")
        return header.index(column.lower()), True
    numbers = range(len(rows[0]))
    found = [i for i in numbers if all(_names_file(row, i) for row in rows[1:] or rows)]
    if not found:
        return None
    named = [i for i in found if header[i] in PATH_NAMES]
    number = (named or found)[0]
    return number, not _names_file(rows[0], number)


def _names_file(row: list[str], number: int) -> bool:
    return number < len(row) and row[number].strip().endswith(ARRAY_SUFFIXES)


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    with reading(path), path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        try:
            reader = csv.reader(file)
            for row in reader:
                if any(cell.strip() for cell in row):
                    yield reader.line_num, row
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: not a valid CSV row: {error}") from None


def _mark(path: Path) -> str:
    with reading(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(MARKED_BYTES)
        file.seek(max(0, size - MARKED_BYTES))
        data += file.read(MARKED_BYTES)
    return f"{size}:{hashlib.blake2b(data, digest_size=16).hexdigest()}"


def _words(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


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
