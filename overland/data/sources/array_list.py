"""A CSV that lists files of images: `.npy`, `.npz` and `.safetensors`.

    path
    run-12/0001.npy
    run-12/all.safetensors

Paths are absolute or relative to the list; the header is optional. A file holds one image, H × W
or C × H × W, or many, with one more leading dimension.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from overland.data.sources.array_files import (
    ARRAY_SUFFIXES,
    WANTED,
    StoredArray,
    Values,
    find_array,
    read_array,
)
from overland.data.sources.compression import reading
from overland.data.sources.source import Arrays, FileSource, Kind
from overland.errors import DataError
from overland.words import any_of
from overland.world.records import record

LOOKED_AT = 64  # rows inspected to tell a list of files from a table of texts
SCANNERS = 16  # threads, since scanning mostly waits for the file system
MARKED_BYTES = 4096  # hashed at the beginning and at the end of each file
MOST_CHANNELS = 4  # no image is this narrow: such a last dimension holds channels
PATH_NAMES = ("path", "file", "filename", "file_path", "file_name")

Shape = tuple[int, int, int]


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
        begin = (number - int(self.ends[which - 1] if which else 0)) * size
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
        return int(self.ends[which] - (self.ends[which - 1] if which else 0))

    def read(self, chunk: str) -> Iterator[Arrays]:
        last = int(self.ends[self.files.index(chunk)])
        for number in range(last - self.num_documents(chunk), last):
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
