"""Files of token ids: plain arrays, `.npy` or `.bin`, whose type is in its name or given; and
Megatron's format, a `.bin` with an `.idx` that has the start of each sequence and document."""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overland.data.sources.compression import reading
from overland.data.sources.source import (
    TOKEN_DTYPES,
    FileSource,
    Kind,
    Tokens,
    check_dtype,
    part_of,
    split_part,
    token_ids,
)
from overland.errors import ChoiceRequired, DataError

# A one-dimensional array has no document boundaries. It is read in pieces of this many tokens, each
# of them a document: long enough for any block, short enough for memory.
PIECE_TOKENS = 1 << 20
ROWS_PER_CHUNK = 4096
LONGEST_HEADER = 10_000  # NumPy's own limit, which it checks only after reading the header
DTYPE_IN_NAME = re.compile(rf"(?:^|[-_.])({'|'.join(TOKEN_DTYPES)})(?=[-_.])")


class NumpyTokens(FileSource):
    """The rows of a two-dimensional array, or pieces of a one-dimensional one, are documents."""

    format = "numpy"
    kind: Kind = "tokens"

    def __init__(
        self, root: Path, files: list[str], dtype: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(root, files, skip_bad)
        self.dtype = check_dtype(dtype)
        self._shapes = {file: self._open(file).shape for file in self.files}
        if not any(np.prod(shape) for shape in self._shapes.values()):
            raise DataError(f"{root / files[0]} is empty: it holds no tokens")

    def chunks(self) -> list[str]:
        return [
            part_of(file, part)
            for file, shape in self._shapes.items()
            for part in range(-(-shape[0] // _chunk_length(shape)))
        ]

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
    if not path.stat().st_size:
        raise DataError(f"{path} is empty")
    with path.open("rb") as file:
        head = file.read(12)  # 6 bytes of magic, the version in 2, the header's length in 2 or 4
    if int.from_bytes(head[8:10] if head[6:7] == b"\1" else head[8:12], "little") > LONGEST_HEADER:
        raise DataError(
            f"{path} is not an array: its header has more than {LONGEST_HEADER:,} bytes"
        )
    try:
        with np.errstate(over="raise"):  # the product of a shape may overflow
            array = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # the header is a Python literal, so it can raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{path} is not an array, or is truncated: {reason}") from None
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise DataError(
            f"{path}: expected a one- or two-dimensional array of integers, got {array.dtype} of "
            f"shape {array.shape}"
        )
    if len(array) and not array.size:  # empty rows take no bytes, so there could be any number
        raise DataError(f"{path} is empty: its {len(array):,} rows have no tokens")
    return array


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


MAGIC = b"MMIDIDX\x00\x00"
HEAD = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
DOCUMENTS_PER_CHUNK = 8192


@dataclass(frozen=True)
class MegatronIndex:
    dtype: str
    lengths: npt.NDArray[np.int32]
    """The length of each sequence, in tokens."""
    pointers: npt.NDArray[np.int64]
    """The offset of each sequence, in bytes."""
    documents: npt.NDArray[np.int64]
    """The first sequence of each document, followed by the number of sequences."""


class Megatron(FileSource):
    """A chunk is a range of documents; a document is one or more sequences, concatenated."""

    format = "megatron"
    kind: Kind = "tokens"

    def __init__(self, root: Path, files: list[str], skip_bad: bool = False) -> None:
        super().__init__(root, files, skip_bad)  # files: the .idx files
        self._counts = {file: len(read_megatron_index(root / file).documents) - 1 for file in files}
        if not any(self._counts.values()):
            raise DataError(f"{root / files[0]} is empty: it lists no documents")

    def chunks(self) -> list[str]:
        return [
            part_of(file, part)
            for file, count in self._counts.items()
            for part in range(-(-count // DOCUMENTS_PER_CHUNK))
        ]

    def num_documents(self, chunk: str) -> int:
        file, part = split_part(chunk)
        first = (part or 0) * DOCUMENTS_PER_CHUNK
        return min(DOCUMENTS_PER_CHUNK, self._counts[file] - first)

    def read(self, chunk: str) -> Iterator[Tokens]:
        file, part = split_part(chunk)
        index = read_megatron_index(self.root / file)
        first = (part or 0) * DOCUMENTS_PER_CHUNK
        path = (self.root / file).with_suffix(".bin")
        with reading(path):
            data = _bytes_of(path)
        size = np.dtype(index.dtype).itemsize
        for number in range(first, first + self.num_documents(chunk)):
            start, stop = index.documents[number], index.documents[number + 1]
            pieces = [
                data[begin : begin + count].view(index.dtype)
                for begin, count in zip(
                    index.pointers[start:stop].tolist(),
                    (index.lengths[start:stop].astype(np.int64) * size).tolist(),
                    strict=True,
                )
            ]
            ids = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
            document = token_ids(ids, f"{path}: document {number:,}", self.bad)
            if document is not None:
                yield document

    def depends_on(self) -> list[str]:
        return [name for file in self.files for name in _pair(file)]

    def files_of(self, chunk: str) -> list[str]:
        return _pair(split_part(chunk)[0])


def _pair(file: str) -> list[str]:
    return [file, str(Path(file).with_suffix(".bin"))]


def read_megatron_index(path: Path) -> MegatronIndex:
    """Reads an index and checks that it is consistent and fits the size of the .bin, so that later
    reads stay in bounds."""
    tokens = path.with_suffix(".bin")
    with reading(path):
        data = _bytes_of(path)
        size = len(data)
    with reading(tokens):
        num_bytes = tokens.stat().st_size
    if size < HEAD.size or bytes(data[: len(MAGIC)]) != MAGIC:
        raise DataError(f"{path} is not a Megatron index: it does not begin with MMIDIDX")
    _, version, code, num_sequences, num_borders = HEAD.unpack(bytes(data[: HEAD.size]))
    if version != 1 or code not in DTYPES:
        raise DataError(
            f"{path} has version {version} and type code {code}; only version 1 with integers is "
            "supported"
        )
    sizes = [HEAD.size, 4 * num_sequences, 8 * num_sequences, 8 * num_borders]
    ends = list(itertools.accumulate(sizes))  # Python ints, because NumPy's would overflow
    if size not in (ends[-1], ends[-1] + num_sequences):  # optionally one mode byte per sequence
        raise DataError(
            f"{path} is truncated or damaged: it has {size:,} bytes, expected {ends[-1]:,}"
        )
    index = MegatronIndex(
        DTYPES[code],
        data[ends[0] : ends[1]].view("<i4"),
        data[ends[1] : ends[2]].view("<i8"),
        data[ends[2] : ends[3]].view("<i8"),
    )
    borders = index.documents
    if not num_borders or borders[0] != 0 or borders[-1] != num_sequences:
        raise DataError(f"{path} is damaged: its documents do not cover its sequences")
    is_back = (borders[1:] < borders[:-1]).any()  # a difference could overflow
    if is_back or (index.lengths < 0).any() or (index.pointers < 0).any():
        raise DataError(f"{path} is damaged: it has negative lengths or offsets")
    reach = index.pointers + index.lengths.astype(np.int64) * np.dtype(index.dtype).itemsize
    if num_sequences and max(reach.max(), index.pointers.max()) > num_bytes:
        worst = int(np.maximum(reach, index.pointers).argmax())
        raise DataError(
            f"{tokens} is truncated: sequence {worst:,} ends at byte {int(reach[worst]):,}, but "
            f"the file has {num_bytes:,} bytes"
        )
    # Sequences may overlap, so a damaged index can describe a document larger than any memory.
    begins = np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])[borders]
    longest = int(np.diff(begins).max(initial=0)) * np.dtype(index.dtype).itemsize
    if longest > num_bytes:
        raise DataError(
            f"{path} is damaged: it has a document of {longest:,} bytes, but {tokens.name} has "
            f"only {num_bytes:,}"
        )
    return index


def _bytes_of(path: Path) -> npt.NDArray[np.uint8]:
    if not path.stat().st_size:  # an empty file cannot be memory-mapped
        return np.zeros(0, np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r")
