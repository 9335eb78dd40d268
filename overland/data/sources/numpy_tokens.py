"""Token ids as plain arrays: `.npy`, or `.bin` whose type is in its name or given."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from overland.data.sources.compression import reading
from overland.data.sources.source import (
    TOKEN_DTYPES,
    FileSource,
    Kind,
    Tokens,
    check_dtype,
    split_part,
    token_ids,
)
from overland.errors import ChoiceRequired, DataError

# A one-dimensional array has no document boundaries. It is read in pieces of this many tokens, each
# of them a document: long enough for any block, short enough for memory.
PIECE_TOKENS = 1 << 20
ROWS_PER_CHUNK = 4096
LONGEST_HEADER = 10_000  # NumPy's own limit, which it checks only after reading the header
# Headers are Python literals, and Python's parser (3.11.7) sometimes fails if several threads use
# it at once: "AST constructor recursion depth mismatch".
PARSING = threading.Lock()
DTYPE_IN_NAME = re.compile(rf"(?:^|[-_.])({'|'.join(TOKEN_DTYPES)})(?=[-_.])")


class NumpyTokens(FileSource):
    """The rows of a two-dimensional array, or pieces of a one-dimensional one, are documents."""

    format = "numpy"
    kind: Kind = "tokens"

    def __init__(self, root: Path, files: list[str], dtype: str | None, skip_bad: bool) -> None:
        super().__init__(root, files, skip_bad)
        self.dtype = check_dtype(dtype)
        self._shapes = {file: self._open(file).shape for file in self.files}
        self.num_parts = {
            file: -(-shape[0] // _chunk_length(shape)) for file, shape in self._shapes.items()
        }
        if not any(np.prod(shape) for shape in self._shapes.values()):
            raise DataError(f"{root / files[0]} is empty: it holds no tokens")

    def num_documents(self, chunk: str) -> int:
        file, part = split_part(chunk)
        shape = self._shapes[file]
        if len(shape) == 1:
            return 1
        return min(ROWS_PER_CHUNK, shape[0] - (part or 0) * ROWS_PER_CHUNK)

    def read(self, chunk: str) -> Iterator[Tokens]:
        file, part = split_part(chunk)
        length = _chunk_length(self._shapes[file])
        start = (part or 0) * length
        found = self._open(file)[start : start + length]
        for number, row in enumerate([found] if found.ndim == 1 else found, start=start):
            place = f"row {number:,}" if found.ndim > 1 else f"tokens from {number:,} on"
            ids = token_ids(row, f"{self.root / file}: {place}", self.bad)
            if ids is not None:
                yield ids

    def _open(self, file: str) -> Any:
        path = self.root / file
        with reading(path):
            return _open_npy(path) if path.suffix == ".npy" else _open_bin(path, self.dtype)


def _open_npy(path: Path) -> Any:
    with path.open("rb") as file, not_an_array(path):
        shape, by_columns, dtype, offset = read_header(file, path)
        if dtype.kind not in "iu" or len(shape) not in (1, 2):
            raise DataError(
                f"{path}: expected a one- or two-dimensional array of integers, got {dtype} of "
                f"shape {shape}"
            )
        with np.errstate(over="raise"):  # the product of a shape may overflow
            array = np.memmap(path, dtype, "r", offset, shape, "F" if by_columns else "C")
    if len(array) and not array.size:  # empty rows take no bytes, so there could be any number
        raise DataError(f"{path} is empty: its {len(array):,} rows have no tokens")
    return array


def read_header(file: IO[bytes], path: Path) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Reads the header of a .npy file: the array's shape, whether it is stored by columns, its
    type, and where its values begin."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"unsupported format version {version}")
    length = file.read(2 if version == (1, 0) else 4)
    size = int.from_bytes(length, "little")
    if size > LONGEST_HEADER:
        raise DataError(
            f"{path} is not an array: its header has more than {LONGEST_HEADER:,} bytes"
        )
    read = np.lib.format.read_array_header_1_0
    if version == (2, 0):
        read = np.lib.format.read_array_header_2_0
    header = io.BytesIO(length + file.read(size))
    with PARSING:
        shape, by_columns, dtype = read(header, LONGEST_HEADER)
    return shape, by_columns, dtype, 8 + len(length) + size


@contextmanager
def not_an_array(path: Path) -> Iterator[None]:
    """Turns a failure to parse a header into a DataError. It is untrusted text, of a Python literal
    or of JSON, so parsing it can raise anything."""
    try:
        yield
    except (OSError, DataError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path} is not an array, or is truncated: {reason}") from None


def _open_bin(path: Path, given: str | None) -> Any:
    named = DTYPE_IN_NAME.search(path.name)
    if given is None and named is None:
        raise ChoiceRequired(
            f"{path}: specify the type of its token ids, in its name (tokens.uint16.bin) or with ",
            "dtype",
            "",
        )
    dtype = np.dtype(given or (named[1] if named else "")).newbyteorder("<")
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise DataError(
            f"{path} is truncated: {size:,} bytes are not a whole number of {dtype.name} values"
        )
    return np.memmap(path, dtype=dtype, mode="r") if size else np.zeros(0, dtype)


def _chunk_length(shape: tuple[int, ...]) -> int:
    return PIECE_TOKENS if len(shape) == 1 else ROWS_PER_CHUNK
