"""Samples that are named arrays, such as an image and its class: checks them against the fields
that a source declares, and decides how a shard stores a sample.

A source of `kind = "arrays"` declares its fields, and each of its documents is a dict with them:

    fields = {"pixels": ("float32", (3, 32, 32)), "label": ("int64", ())}

A shard stores a record per sample: the bytes of its fields, concatenated.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from overland.errors import DataError

Values = npt.NDArray[Any]
TYPES = "biuf"  # booleans, integers and floats, which both numpy and torch have
LARGEST = 8  # bytes: torch has no long doubles
RESERVED = ("sample_B", "epoch_B")
WEIGHT = "weight_B"
# Memory for batches is reused once nothing refers to it: the kernel provides new memory page by
# page, zeroed, and reading 16-bit images of 1920² into it took 1.7 times as long.
SMALLEST = 1 << 20  # bytes; the allocator itself keeps smaller blocks
MOST_KEPT = 4  # free buffers of each size
_kept: dict[int, list[mmap.mmap]] = {}
_lock = threading.Lock()


class Unfit(Exception):
    """Raised when a document does not match what its source declared; the message says how."""


@dataclass(frozen=True)
class Field:
    dtype: str
    """In numpy's notation, little-endian."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * prod(self.shape)

    def __str__(self) -> str:
        shape = " × ".join(map(str, self.shape))
        return f"{np.dtype(self.dtype).name} {shape}".rstrip()


@dataclass(frozen=True)
class Arrays:
    """The fields of a sample, in the order of a record."""

    fields: Mapping[str, Field]

    @classmethod
    def declared(cls, name: str, fields: Any) -> Arrays:
        """Returns the fields that a source declares, or raises an error that says what is wrong."""
        try:
            known = {
                str(field): Field(np.dtype(dtype).newbyteorder("<").str, tuple(map(int, shape)))
                for field, (dtype, shape) in dict(fields).items()
            }
        except (TypeError, ValueError) as error:
            raise DataError(
                f'{name} is a source of arrays: expected fields such as {{"pixels": ("float32", '
                f"(3, 32, 32))}}, got {fields!r} ({error})"
            ) from None
        for field, one in known.items():
            if not field.isidentifier() or field in RESERVED:
                raise DataError(f"{name}: a field cannot be named {field!r}")
            dtype = np.dtype(one.dtype)
            is_known = dtype.kind in TYPES and dtype.itemsize <= LARGEST
            if not is_known or min(one.shape, default=1) < 1:
                raise DataError(
                    f"{name}: field {field} is {one}; expected booleans, integers or floats of at "
                    f"most {8 * LARGEST} bits, and a shape without zeros"
                )
        if not known:
            raise DataError(f"{name} is a source of arrays, but declares no fields")
        if WEIGHT in known and known[WEIGHT] != Field("<f4", ()):
            raise DataError(f'{name}: {WEIGHT} is the weight of a row: expected ("float32", ())')
        return cls(known)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields in the form that a source declares and `declared` reads."""
        return {name: [field.dtype, list(field.shape)] for name, field in self.fields.items()}

    @cached_property
    def num_bytes(self) -> int:
        """The size of a record."""
        return sum(field.num_bytes for field in self.fields.values())

    def encode(self, document: Any) -> npt.NDArray[np.uint8]:
        """Returns the record of a document, which must have the declared fields."""
        if not isinstance(document, Mapping):
            raise Unfit(f"is {type(document).__name__}; expected a dict of arrays")
        if set(document) != set(self.fields):
            expected = ", ".join(self.fields)
            raise Unfit(f"has the fields {', '.join(map(str, document))}; expected {expected}")
        parts = []
        for name, field in self.fields.items():
            values = as_array(document[name], name)
            found = Field(values.dtype.newbyteorder("<").str, values.shape)
            if found != field:
                raise Unfit(f"has {name} as {found}, but {field} was declared")
            if name == WEIGHT:
                require_weights(values, name)
            parts.append(np.ascontiguousarray(values, field.dtype).reshape(-1).view(np.uint8))
        return np.concatenate(parts)

    def decode(self, record: Values) -> dict[str, Values]:
        """Returns the arrays of a record."""
        arrays, at = {}, 0
        for name, field in self.fields.items():
            data = record[at : at + field.num_bytes]
            arrays[name] = data.view(field.dtype).reshape(field.shape)
            at += field.num_bytes
        return arrays

    def empty(self, rows: int) -> dict[str, Values]:
        return {
            name: empty_array((rows, *field.shape), field.dtype)
            for name, field in self.fields.items()
        }

    def __str__(self) -> str:
        return ", ".join(f"{name} ({field})" for name, field in self.fields.items())


def as_array(values: Any, name: str) -> Values:
    try:
        return np.asarray(values)
    except ValueError:
        raise Unfit(f"has {name} as lists of different lengths") from None


def require_weights(values: Values, name: str) -> None:
    """Rejects weights that are negative or not finite, since the loss is divided by their sum."""
    wrong = values[~(np.isfinite(values) & (values >= 0))]
    if wrong.size:
        raise Unfit(f"has {wrong.flat[0]:g} in {name}; expected a weight of 0 or more")


def require_fields(
    name: str,
    held: Arrays | None,
    taken: Mapping[str, tuple[str, tuple[int, ...]]] | None,
    model: str,
    casts: bool = False,
) -> None:
    """Rejects a source without the inputs of a model: the arrays `taken`, or tokens. Additional
    fields are fine, and so are other types if the model casts them."""
    if taken is None:
        if held is not None:
            raise DataError(
                f"{name} has {held}, but {model} takes tokens (a model that takes arrays defines "
                "sample_fields(), see docs/extending.md)"
            )
        return
    wanted = Arrays.declared(model, taken)
    given = held.fields if held is not None else {}
    if casts:
        types = {name: field.dtype for name, field in wanted.fields.items()}
        given = {
            name: replace(one, dtype=types.get(name, one.dtype)) for name, one in given.items()
        }
    if not wanted.fields.items() <= given.items():
        found = held if held is not None else "text or tokens"
        raise DataError(
            f"{name} has {found}, but {model} takes {wanted}: use a source of arrays with these "
            "fields (docs/extending.md)"
        )


def empty_array(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns an array whose memory is reused once the last array or tensor on it is gone."""
    size = prod(shape) * np.dtype(dtype).itemsize
    if size < SMALLEST:
        return np.empty(shape, dtype)
    with _lock:
        kept = _kept.get(size)
        memory = kept.pop() if kept else mmap.mmap(-1, size)
    # Every view refers to this array, because its own base (the mmap) is not an array.
    flat = np.frombuffer(memory, dtype)
    weakref.finalize(flat, _give_back, size, memory).atexit = False
    return flat.reshape(shape)


def _give_back(size: int, memory: mmap.mmap) -> None:
    with _lock:
        kept = _kept.setdefault(size, [])
        if len(kept) < MOST_KEPT:
            kept.append(memory)
