"""Generated data, to train on without a download: random tokens, noise images, and images of shapes
(discs, boxes and stripes in uniform grays, on a background that gets lighter in some direction).
Block or image i is a function of i, and of the seed of a run if it is random, alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from overland.apps.data.tokenizer_training import trained_size
from overland.data.arrays import Arrays
from overland.data.lanes import ImageSet, Lane, MadeRows, Rows, Samples
from overland.data.plan import Segment
from overland.data.registry import HELD_OUT_SHAPES, RANDOM
from overland.data.sources.file_marks import digest_of
from overland.data.sources.image_files import WANTED
from overland.data.wanted import WantedSource, taken_by_model
from overland.data.windows import Reading
from overland.errors import DataError

Array = npt.NDArray[np.int64]
DOCUMENTS_PER_BLOCK = 4
HELD_OUT = 1 << 40  # number of the first validation image: no training set is this large
FEWEST, MOST = 1, 3  # shapes in an image


def made_rows(
    wanted: WantedSource, vocab_size: int | None, report: Callable[[str], None]
) -> MadeRows:
    """Returns random tokens, or generated images for a model that takes images."""
    config, images = wanted.config, made_images(wanted)
    if images is None:
        size = trained_size(config.data, None) if vocab_size is None else vocab_size
        return RandomBlocks(size, config.debug.seed)
    if wanted.missing is not None:
        used = "validated" if wanted.is_for_validation else "trained"
        shape = " × ".join(map(str, images.shape))
        report(
            f"note: {wanted.missing} does not exist, so the model is {used} on {len(images):,} "
            f"random images of {shape} ({wanted.table}.dataset_path; set "
            'images.if_missing = "error" to stop instead)'
        )
    return images


def made_images(wanted: WantedSource) -> ImageSet | None:
    """Returns generated images for a model that takes only images, or None for one that takes
    tokens."""
    config, kind, taken = wanted.config, wanted.dataset, taken_by_model(wanted.config)
    if taken is None or set(taken) != {WANTED}:
        if kind != RANDOM:
            raise DataError(f"{kind} are images, but {config.model.name} does not take images")
        return None
    settings = config.images
    _, shape = taken[WANTED]
    channels, height, width = settings.shape or shape
    size = (channels, height, width)
    if kind != RANDOM:
        return ShapeImages(wanted.name, settings.count, size, kind == HELD_OUT_SHAPES)
    if settings.pad and (height > settings.pad[0] or width > settings.pad[1]):
        raise DataError(
            f"images.shape is {channels} × {height} × {width}, which cannot be padded to "
            f"{settings.pad[0]} × {settings.pad[1]}: increase images.pad"
        )
    return RandomImages(wanted.name, settings.count, size, settings.pad, config.debug.seed)


@dataclass(frozen=True)
class RandomBlocks(MadeRows, Lane):
    """Uniform random ids, for proofs and benchmarks: block i depends only on the seed and i.

    Blocks contain about `DOCUMENTS_PER_BLOCK` documents, for runs with document boundaries.
    """

    vocab_size: int
    seed: int = 0
    source: int = 0
    """Its number in the plan."""
    seq_len: int = 0

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return f"random-{self.vocab_size}"

    def as_lane(self, name: str, source: int, reading: Reading, max_epochs: int | None) -> Lane:
        return replace(self, source=source)

    def in_segment(self, segment: Segment) -> Lane:
        return replace(self, seq_len=segment.seq_len)

    def read(self, numbers: Array, rows: Array, into: Rows | Samples) -> None:
        assert isinstance(into, Rows)
        for number, row in zip(numbers.tolist(), rows.tolist(), strict=True):
            draw, size = np.random.default_rng((self.seed, number)), self.seq_len + 1
            into.tokens[row] = draw.integers(self.vocab_size, size=size)
            into.begins[row] = draw.random(size) < DOCUMENTS_PER_BLOCK / self.seq_len
        into.begins[rows, 0] = True
        into.num_tokens[rows] = self.seq_len + 1
        into.sample[rows], into.epoch[rows] = (self.source << 56) + numbers, 0

    def lengths(self, numbers: Array) -> Array:
        return np.full(len(numbers), self.seq_len + 1)


class ShapeImages(ImageSet):
    def __init__(self, name: str, count: int, shape: tuple[int, int, int], held_out: bool) -> None:
        self.arrays = Arrays.declared(name, {WANTED: ("float32", shape)})
        self.fingerprint = f"shapes-{digest_of([count, shape, held_out])}"
        self.count, self.shape, self._first = count, shape, HELD_OUT if held_out else 0
        height, width = shape[1:]
        y, x = np.mgrid[:height, :width].astype(np.float32)
        self._y, self._x = y / height * 2 - 1, x / width * 2 - 1

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
        return inside


class RandomImages(ImageSet):
    """Normally distributed noise, for trial runs; image i is always the same."""

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

    def fill(self, number: int, into: npt.NDArray[Any]) -> None:
        draw = np.random.Generator(np.random.SFC64((*self._key, number)))
        if self.shape == into.shape and into.flags.c_contiguous:
            draw.standard_normal(out=into, dtype=np.float32)
        else:
            into[...] = 0
            into[self._place] = draw.standard_normal(self.shape, np.float32)
