"""Images in files: reads a CSV that lists `.npy`, `.npz` and `.safetensors` files, decides how many
images an array holds, and pads smaller ones to the common size.

    path
    run-12/0001.npy
    run-12/all.safetensors

Paths are absolute or relative to the list; the header is optional. A file holds one image, H × W
or C × H × W, or many, with one more leading dimension. No code in a file is ever run, and a size
that a header claims is checked against the file before it is used.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from overland.data.sources.compression import reading
from overland.data.sources.numpy_tokens import not_an_array, read_header
from overland.data.sources.source import FileSource, Kind
from overland.data.sources.text import rows_of
from overland.errors import DataError
from overland.words import any_of
from overland.world.records import record

ARRAY_SUFFIXES = (".npy", ".npz", ".safetensors")
WANTED = "pixel_values"  # the array to read from a file that has several
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
        super().__init__(path.parent, listed_files(path, column), skip_bad)
        with ThreadPoolExecutor(SCANNERS) as pool:
            found = dict(zip(self.files, pool.map(self._scan, self.files), strict=True))
        for one in found.values():
            if isinstance(one, DataError):
                self.bad(str(one))
        readable = {file: one for file, one in found.items() if not isinstance(one, DataError)}
        if not readable:
            raise DataError(f"{path} lists no readable file: {self.num_bad:,} were skipped")
        self.files = list(readable)
        self.stored = [array for array, _ in readable.values()]
        self._marks = [mark for _, mark in readable.values()]
        each = [
            images_in(array.shape, channels, root=self.root / file)
            for file, array in zip(self.files, self.stored, strict=True)
        ]
        self.shapes = [shape for _, shape in each]
        """The shape of one image, for each file."""
        self.starts = np.cumsum([0, *(count for count, _ in each)])
        """The number of the first image of each file, and the number of all images."""
        self.dtype_of_all = np.dtype(self.stored[0].dtype).newbyteorder("<").str
        channels, height, width = self.shapes[0]
        height, width = pad or (height, width)
        self.shape = (channels, int(height), int(width))
        """The shape that every image is padded to."""
        for file, array, shape in zip(self.files, self.stored, self.shapes, strict=True):
            self._check(file, array, shape, is_padded=pad is not None)
        self.fields = {WANTED: (self.dtype_of_all, self.shape)}

    def __len__(self) -> int:
        """The number of images."""
        return int(self.starts[-1])

    def fill(self, number: int, into: Values) -> None:
        """Reads an image into an array of this source's type and shape."""
        which = int(np.searchsorted(self.starts, number, side="right")) - 1
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

    def digest(self) -> str:
        """Returns a digest of the order of the images and of each file's name, size, beginning and
        end; `overland prove data` compares all bytes."""
        parts = (*self.files, *self._marks, str(self.shape))
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    def _scan(self, file: str) -> tuple[StoredArray, str] | DataError:
        """Reads the header of a file, and marks the file."""
        try:
            return find_array(self.root / file), _mark(self.root / file)
        except DataError as error:
            return error

    def _check(self, file: str, array: StoredArray, shape: Shape, is_padded: bool) -> None:
        """Raises an error for images that do not belong together."""
        path, all_types = self.root / file, np.dtype(self.dtype_of_all)
        if np.dtype(array.dtype).newbyteorder("<") != all_types:
            raise DataError(
                f"{path} contains {np.dtype(array.dtype)} but {self.files[0]} contains "
                f"{all_types}: all images in a list must have the same dtype"
            )
        if not is_padded and shape != self.shape:
            raise DataError(
                f"{path} has an image of {_words(shape)}, but {self.files[0]} has "
                f"{_words(self.shape)}: set images.pad to the height and width of the largest"
            )
        if shape[0] != self.shape[0] or shape[1] > self.shape[1] or shape[2] > self.shape[2]:
            raise DataError(
                f"{path} has an image of {_words(shape)}, which cannot be padded to "
                f"{_words(self.shape)}: increase images.pad, or remove the file from the list"
            )


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
        name = row[number] if number < len(row) else ""
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
    header = [name.lower() for name in rows[0]]
    if column is not None:
        if column.lower() not in header:
            raise DataError(f"{path} has no column {column!r}; it has {', '.join(rows[0])}")
        return header.index(column.lower()), True
    is_file = [[name.endswith(ARRAY_SUFFIXES) for name in row] for row in rows]
    named = is_file[1:] or is_file
    found = [i for i in range(len(header)) if all(any(row[i : i + 1]) for row in named)]
    if not found:
        return None
    number = next((i for i in found if header[i] in PATH_NAMES), found[0])
    return number, not is_file[0][number]


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    def refuse(message: str) -> None:
        raise DataError(message)

    for line, row in rows_of(path, refuse):
        cells = [cell.strip() for cell in row]
        if any(cells):
            yield line, cells


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
    with reading(path), path.open("rb") as file, not_an_array(path):
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise DataError(f"{path} is empty")
        if path.suffix == ".npy":
            array = _npy(file, path)
        else:
            array = _npz(file, path) if path.suffix == ".npz" else _safetensors(file, path, size)
    if not array.member and array.offset + array.num_bytes > size:
        raise DataError(
            f"{path} is truncated: {_words(array.shape)} {np.dtype(array.dtype)} "
            f"values need {array.offset + array.num_bytes:,} bytes, but the file has {size:,}"
        )
    return array


def read_array(path: Path, array: StoredArray, into: Values, first: int = 0) -> None:
    """Fills `into`, which must be contiguous and have the array's dtype, with the array's bytes
    from `first` on."""
    view = into.reshape(-1).view(np.uint8).data
    with reading(path), _opened(path, array.member) as file:
        file.seek(array.offset + first)  # decompresses a member from its first byte on
        while view:
            count = file.readinto(view)
            if not count:
                raise DataError(f"{path} is truncated: it ends at byte {file.tell():,}")
            view = view[count:]


@contextmanager
def _opened(path: Path, member: str) -> Iterator[Any]:
    """Opens a file without a buffer, or a compressed member of a zip."""
    if not member:
        with path.open("rb", buffering=0) as file:
            yield file
        return
    try:
        with zipfile.ZipFile(path) as archive, archive.open(member) as unzipped:
            yield unzipped
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise DataError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from None


def _npy(file: IO[bytes], path: Path) -> StoredArray:
    """The array of a .npy file, or of a .npy member of a zip."""
    shape, by_columns, dtype, offset = read_header(file, path)
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
    return StoredArray(dtype.str, _checked(shape, path), offset)


def _npz(file: IO[bytes], path: Path) -> StoredArray:
    with zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        info = members[_chosen(list(members), path)]
        with archive.open(info) as member:
            array = _npy(member, path)
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
