"""What lies in a checkpoint's folder.

    step_100/
      rank_00000.safetensors …   parts of tensors, plain safetensors files
      index.json                 which part of which tensor lies where, with its checksums; the run
      COMMITTED                  written last: the checksum of index.json, the step, the loss

A folder without COMMITTED is no checkpoint. Nothing here can run code: JSON and raw numbers.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from overland.checkpoint.checksum import BLOCK
from overland.checkpoint.errors import CheckpointError

INDEX = "index.json"
COMMITTED = "COMMITTED"
FORMAT = "overland checkpoint"
VERSION = 1

# safetensors' names of types.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Part(NamedTuple):
    """A box of a tensor, lying in one piece in one file. A large run has a million of them.

    `offset` is that of its first byte, from the start of the file; `start` that of its first
    element, in the tensor; there is a checksum per block of bytes, counted from the first byte.
    """

    file: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    checksums: Sequence[int]


@dataclass
class Entry:
    """A tensor and where its parts are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileInfo:
    """A file of parts. `blocks` are checksums of all of it, where there is more in it than a header
    and tensors; for the others header and tensors are all."""

    num_bytes: int
    header: int
    header_checksum: int
    blocks: tuple[int, ...] = ()


@dataclass
class Index:
    """`run` is what is not a tensor: progress, data state, config, versions."""

    kind: str
    world_size: int
    tensors: dict[str, Entry]
    files: dict[str, FileInfo]
    run: dict[str, Any]

    def to_json(self) -> bytes:
        """Tensor by tensor: one call for all of a large run's would hold up every other thread."""
        number = {name: i for i, name in enumerate(self.files)}
        document = {
            "format": FORMAT,
            "version": VERSION,
            "type": self.kind,
            "world_size": self.world_size,
            "block": BLOCK,
            "run": self.run,
            "files": [
                [name, info.num_bytes, info.header, info.header_checksum, info.blocks]
                for name, info in self.files.items()
            ],
            "parts": "file, offset, start, shape, checksums",
        }
        pieces = [_json(document)[:-1], ',"tensors":{']
        for i, (name, entry) in enumerate(self.tensors.items()):
            parts = [(number[part.file], *part[1:]) for part in entry.parts]
            described = {"dtype": DTYPE_NAMES[entry.dtype], "shape": entry.shape, "parts": parts}
            pieces.append(f"{',' if i else ''}{_json(name)}:{_json(described)}")
        return "".join([*pieces, "}}"]).encode()

    @classmethod
    def from_json(cls, data: bytes, where: Path) -> Index:
        try:
            with no_garbage_collection():
                return cls._parse(data)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise CheckpointError(f"{where} is not the index of a checkpoint: {error}") from None

    @classmethod
    def _parse(cls, data: bytes) -> Index:
        document = json.loads(data)
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}")
        if document["version"] > VERSION or document["block"] != BLOCK:
            raise ValueError(f"version {document['version']} needs a newer Overland")
        files = {
            _plain_name(name): FileInfo(size, header, checksum, tuple(blocks))
            for name, size, header, checksum, blocks in document["files"]
        }
        names = list(files)
        tensors = {
            name: Entry(
                DTYPES[entry["dtype"]],
                tuple(entry["shape"]),
                [
                    Part(names[i], offset, tuple(start), tuple(shape), checksums)
                    for i, offset, start, shape, checksums in entry["parts"]
                ],
            )
            for name, entry in document["tensors"].items()
        }
        return cls(document["type"], document["world_size"], tensors, files, document["run"])


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A million small objects that all stay: looking for garbage among them took four fifths of
    the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def header_of(parts: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    """A safetensors header for tensors that follow each other in this order. Parts of a tensor
    bear its name and their box: `model.norm.weight[0:16]`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape in parts:
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = _json(header).encode()
    text += b" " * (-len(text) % 64)  # so that the numbers begin on a round address
    return len(text).to_bytes(8, "little") + text


def tile(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether boxes (start, shape) fill a tensor, each element once."""
    boxes = [box for box in boxes if math.prod(box[1])]
    if sum(math.prod(size) for _, size in boxes) != math.prod(shape):
        return False
    if not shape:
        return True
    boxes.sort()
    for i, (start, size) in enumerate(boxes):
        if any(a + n > whole for a, n, whole in zip(start, size, shape, strict=True)):
            return False
        for other, other_size in itertools.islice(boxes, i + 1, None):
            if other[0] >= start[0] + size[0]:
                break  # they are in order of their first rows
            pairs = zip(start, size, other, other_size, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in pairs):
                return False
    return True


def name_of_part(
    name: str, start: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]
) -> str:
    if shape == whole:
        return name
    box = ",".join(f"{a}:{a + n}" for a, n in zip(start, shape, strict=True))
    return f"{name}[{box}]"


def marker(index: bytes, about: dict[str, Any]) -> bytes:
    """The contents of COMMITTED: it vouches for the index, and for itself."""
    document = {**about, "index_bytes": len(index), "index_crc32": zlib.crc32(index)}
    return (json.dumps({**document, "crc32": _sum_of(document)}, indent=2) + "\n").encode()


def parse_marker(text: bytes) -> dict[str, Any]:
    """ValueError if it is not as it was written."""
    document = json.loads(text)
    if not isinstance(document, dict) or document.pop("crc32", None) != _sum_of(document):
        raise ValueError("it does not match its checksum")
    return document


def _sum_of(document: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _plain_name(name: str) -> str:
    """An index names files of its own folder and no others."""
    if name != Path(name).name or name in ("", ".", ".."):
        raise ValueError(f"it names a file outside its folder: {name!r}")
    return name
