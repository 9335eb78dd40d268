"""Images that are read one by one from their files, or generated from noise, without shards.

Image i of a stream is a function of the set, the seed and i alone: its epoch is i // n, and a keyed
permutation for that epoch determines which of the n images it is. The order therefore does not
depend on the number of ranks or on restarts.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from overland.data.arrays import Arrays
from overland.data.order import permute
from overland.data.rows import Origins
from overland.data.sources.array_files import WANTED
from overland.data.sources.array_list import ArrayList
from overland.data.sources.marks import digest_of
from overland.data.windows import Exhausted, Reading

Array = npt.NDArray[np.int64]
READERS = max(2, min(8, os.cpu_count() or 2))  # threads, which wait for the disk or copy


class ImageSet(Protocol):
    """Images, numbered from 0."""

    num_bad: int

    @property
    def fingerprint(self) -> str: ...

    @property
    def arrays(self) -> Arrays: ...

    def __len__(self) -> int: ...

    def fill(self, number: int, into: npt.NDArray[Any]) -> None:
        """Reads an image into an array of the declared type and shape."""


class ListedImages:
    """The images of a list of files."""

    def __init__(self, name: str, source: ArrayList) -> None:
        self.source, self.num_bad = source, source.num_bad
        self.arrays = Arrays.declared(name, source.fields)
        self.fingerprint = f"images-{source.digest()}"

    def __len__(self) -> int:
        return len(self.source)

    def fill(self, number: int, into: npt.NDArray[Any]) -> None:
        self.source.fill(number, into)


class RandomImages:
    """Normally distributed noise, for trial runs; image i is always the same."""

    num_bad = 0

    def __init__(
        self, name: str, count: int, shape: tuple[int, int, int], pad: list[int] | None, seed: int
    ) -> None:
        channels, height, width = shape
        whole = (channels, *(pad or (height, width)))
        self.arrays = Arrays.declared(name, {WANTED: ("float32", whole)})
        self.count, self.shape = count, shape
        self.fingerprint = f"random-images-{digest_of([name, count, shape, whole])}"
        self._key = (seed, int(digest_of(name), 16))
        top, left = (whole[1] - height) // 2, (whole[2] - width) // 2
        self._place = (slice(None), slice(top, top + height), slice(left, left + width))

    def __len__(self) -> int:
        return self.count

    def fill(self, number: int, into: npt.NDArray[Any]) -> None:
        draw = np.random.Generator(np.random.SFC64((*self._key, number)))
        if self.shape == into.shape and into.flags.c_contiguous:
            draw.standard_normal(out=into, dtype=np.float32)
        else:
            into[...] = 0
            into[self._place] = draw.standard_normal(self.shape, np.float32)


@dataclass(frozen=True)
class ImageStream:
    """The images of a set, epoch after epoch, each in its own order."""

    name: str
    source: int
    """Its number in the plan."""
    images: ImageSet
    reading: Reading
    max_epochs: int | None = None

    def read_samples(
        self, numbers: Array, rows: Array, arrays: Arrays, into: Mapping[str, npt.NDArray[Any]]
    ) -> tuple[Array, Array]:
        """Fills `rows` of `into`; returns the number and the epoch of each image."""
        which, epoch = self.places(numbers)
        fields = {name: into[name] for name in arrays.fields}
        (values,) = fields.values()
        jobs = [
            _readers(os.getpid()).submit(self.images.fill, number, values[row])
            for number, row in zip(which.tolist(), rows.tolist(), strict=True)
        ]
        for job in jobs:
            job.result()
        return (self.source << 56) + which, epoch

    def origins(self, numbers: Array, rows: Array) -> list[Origins]:
        which, _ = self.places(numbers)
        none = np.zeros_like(rows)
        return [Origins(rows, none + self.source, which, none, none + 1)]

    def places(self, numbers: npt.ArrayLike) -> tuple[Array, Array]:
        """Returns the number in the set of each image of the stream, and its epoch."""
        size = len(self.images)
        epoch, place = np.divmod(np.asarray(numbers, np.int64), size)
        if self.max_epochs is not None and epoch.size and epoch.max() >= self.max_epochs:
            times = "time" if self.max_epochs == 1 else "times"
            raise Exhausted(
                f"{self.name} has been read {self.max_epochs} {times}, the limit set by its "
                f"max_epochs: raise it, lower the source's weight, or train for fewer steps"
            )
        if self.reading.shuffle:
            for one in np.unique(epoch).tolist():
                now = epoch == one
                place[now] = permute(place[now], size, "images", self.reading.seed, self.name, one)
        return place, epoch

    def num_blocks_in(self, epochs: float, enough: int = sys.maxsize) -> int:
        """Returns the number of images in this many epochs, but at most `enough`."""
        return min(math.ceil(epochs * len(self.images)), enough)


@cache
def _readers(process: int) -> ThreadPoolExecutor:
    """Returns the thread pool of a process; a forked process does not have its parent's threads."""
    return ThreadPoolExecutor(READERS, "image-reader")


HELD_OUT = 1 << 40  # number of the first validation image: no training set is this large
FEWEST, MOST = 1, 3  # shapes in an image


class ShapeImages:
    num_bad = 0

    def __init__(self, name: str, count: int, shape: tuple[int, int, int], held_out: bool) -> None:
        self.arrays = Arrays.declared(name, {WANTED: ("float32", shape)})
        self.fingerprint = f"shapes-{digest_of([count, shape, held_out])}"
        self.count, self.shape, self._first = count, shape, HELD_OUT if held_out else 0
        height, width = shape[1:]
        y, x = np.mgrid[:height, :width].astype(np.float32)
        self._y, self._x = y / height * 2 - 1, x / width * 2 - 1

    def __len__(self) -> int:
        return self.count

    def fill(self, number: int, into: npt.NDArray[Any]) -> None:
        draw = np.random.default_rng(self._first + number)
        for channel in into:
            angle = draw.uniform(0, 2 * np.pi)
            channel[:] = 0.5 * (np.cos(angle) * self._x + np.sin(angle) * self._y)
            for _ in range(draw.integers(FEWEST, MOST + 1)):
                channel[self._shape(draw)] = draw.uniform(-1.5, 1.5)

    def _shape(self, draw: np.random.Generator) -> npt.NDArray[np.bool_]:
        """Returns the pixels of a shape at a random place in the image, rotated randomly."""
        angle, middle = draw.uniform(0, 2 * np.pi), draw.uniform(-0.7, 0.7, 2)
        y, x = self._y - middle[0], self._x - middle[1]
        along = np.cos(angle) * x + np.sin(angle) * y
        across = np.cos(angle) * y - np.sin(angle) * x
        size, thin = draw.uniform(0.3, 0.7), draw.uniform(0.5, 1.0)
        kind = draw.integers(3)
        if kind == 0:
            inside = along**2 + (across / thin) ** 2 < size**2
        elif kind == 1:
            inside = (np.abs(along) < size) & (np.abs(across) < size * thin)
        else:
            inside = np.abs(across) < size / 4
        found: npt.NDArray[np.bool_] = inside
        return found
