"""Megatron's format: a `.bin` of token ids, and an `.idx` with the start of each sequence and
document."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from overland.data.sources.compression import reading
from overland.data.sources.source import FileSource, Kind, Tokens, split_part, token_ids
from overland.errors import DataError

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
        self.num_parts = {
            file: -(-count // DOCUMENTS_PER_CHUNK) for file, count in self._counts.items()
        }
        if not any(self._counts.values()):
            raise DataError(f"{root / files[0]} is empty: it lists no documents")

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
