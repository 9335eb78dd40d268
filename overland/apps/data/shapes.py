"""Generated images of shapes, to train on without a download: discs, boxes and stripes in uniform
grays, on a background that gets lighter in some direction. Image i is a function of i alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from overland.data.arrays import Arrays
from overland.data.lanes import ImageSet
from overland.data.sources.file_marks import digest_of
from overland.data.sources.image_files import WANTED

HELD_OUT = 1 << 40  # number of the first validation image: no training set is this large
FEWEST, MOST = 1, 3  # shapes in an image


class ShapeImages(ImageSet):
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
