"""What all formats share: a checkpoint of lazy tensors in files, each of which may wrap others
(joining shards, permuting rows, casting), the options of a target, how it is cut into files, and
the files next to weights that describe a model.

Tensors are named like a run's own state: `model.<Hugging Face name>`, `optimizer.<name>.<state>`
(for AdamW: exp_avg and exp_avg_sq), `optimizer.num_updates`. Everything else in a file keeps its
name. One tensor is in memory at a time. Files are read, not mapped, since pages of a mapped file
count as memory of the process.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overland.checkpoint.format import checksum
from overland.checkpoint.lazy import (
    MODEL,
    MOMENTS,
    NUM_UPDATES,
    OPTIMIZER,
    Lazy,
    Origin,
    Shape,
    counter,
    slices_of,
)
from overland.checkpoint.write import bytes_of
from overland.data.tokenizer_files import refuse_link_out
from overland.errors import CheckpointError
from overland.files import new_file, read_object, sync
from overland.words import did_you_mean, nearest_name

# The maximum in torch.
MAX_DIMS = 64
# Read at once: small enough to report progress in time on a slow disk.
READ_BYTES = 1 << 24
# Cells that the edges of a tensor's parts cut it into; no layout has this many.
MOST_CELLS = 1 << 24
# Frequencies that some models store although they follow from the config.
COMPUTED = ("rope.freqs", "freqs_cis", "rotary_emb.inv_freq")

DEFAULT_SHARD_BYTES = 5 * 1000**3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Config = dict[str, Any] | None
"""The contents of a config.json, if there is one."""


@dataclass
class LazyCheckpoint:
    """What readers return and writers accept. `extras`: step, batch, tokens, best_validation_loss,
    learning rates and `param_groups` (torch's, with parameter names) if the format has them.
    `config`: the contents of a config.json. `companions`: tokenizer and generation config.
    `adapter`: the contents of an adapter_config.json, if there are adapters. `left_out`: weights
    that are needed but stored elsewhere."""

    format: str
    folder: Path
    tensors: dict[str, Lazy]
    extras: dict[str, Any] = field(default_factory=dict)
    config: Config = None
    companions: list[Path] = field(default_factory=list)
    adapter: Config = None
    left_out: Origin | None = None

    @property
    def own_model(self) -> str | None:
        """The config class of a run's model, if a user registered it."""
        return (self.extras.get("run") or {}).get("own_model")

    def read(self, name: str) -> Tensor:
        """Returns the whole tensor, on the CPU."""
        if name in self.tensors:
            return self.tensors[name].load()
        near = nearest_name(str(name), self.tensors)
        advice = f"did you mean {near!r}?" if near else "its `tensors` lists all of them"
        raise CheckpointError(f"{self.folder} has no tensor {name!r}; {advice}")

    def weights(self) -> dict[str, Lazy]:
        """Returns the model's tensors by their Hugging Face names."""
        return {
            name.removeprefix(MODEL): lazy
            for name, lazy in self.tensors.items()
            if name.startswith(MODEL)
        }

    def states(self) -> Iterator[tuple[str, str, Lazy]]:
        """Yields the optimizer state: (parameter, name of the state, tensor)."""
        for name, lazy in self.tensors.items():
            if (state := split_state(name, self.tensors)) is not None:
                yield *state, lazy

    def with_tensors(self, tensors: dict[str, Lazy]) -> LazyCheckpoint:
        return replace(self, tensors=tensors)


def split_state(name: str, tensors: Container[str]) -> tuple[str, str] | None:
    """Splits `optimizer.<parameter>.<state>`; None if there is no such parameter in the model."""
    parameter, _, kind = name.removeprefix(OPTIMIZER).rpartition(".")
    is_state = name.startswith(OPTIMIZER) and (MODEL + parameter in tensors or kind in MOMENTS)
    return (parameter, kind) if is_state else None


@dataclass(frozen=True, eq=False)
class Stored(Lazy):
    """A range of a file. `offset` is the position of its first byte; without `stride`, which only
    tensors with elements have, it is contiguous. `crc32`, if known, is checked when the whole
    tensor is read."""

    path: Path
    offset: int
    stride: Shape | None = None
    crc32: int | None = None

    def load(self) -> Tensor:
        if self.stride is None:
            return self._read(self.shape, 0)
        span = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return self._read((span,), 0).as_strided(self.shape, self.stride).contiguous()

    def load_box(self, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        if self.stride is not None or not self.shape:
            return super().load_box(start, shape)
        row = self.shape[1:]
        rows = self._read((shape[0], *row), start[0] * math.prod(row))
        return rows[slices_of((0, *start[1:]), shape)]

    def part(self, start: int, count: int) -> Stored:
        """Returns a range of elements of a contiguous tensor, as a vector."""
        assert self.stride is None
        if not 0 <= start <= start + count <= self.numel:
            raise CheckpointError(f"{self.path} is too short for its parameters")
        return Stored((count,), self.dtype, self.path, self.offset + start * self.dtype.itemsize)

    def _read(self, shape: Shape, first: int) -> Tensor:
        out = torch.empty(shape, dtype=self.dtype)
        self.read_into(out, first)
        if self.crc32 is not None and shape == self.shape and checksum(bytes_of(out)) != self.crc32:
            raise CheckpointError(f"{self.path} is damaged: its data changed after it was written")
        return out

    def read_into(self, out: Tensor, first: int = 0) -> None:
        view = bytes_of(out)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset + first * self.dtype.itemsize)
            while view.nbytes:
                got = file.readinto(view[:READ_BYTES])
                if not got:
                    raise CheckpointError(f"{self.path} ends before its tensors do")
                counter()(got)
                view = view[got:]


@dataclass(frozen=True, eq=False)
class Joined(Lazy):
    """Several vectors, concatenated and reshaped, as DeepSpeed stores parameters."""

    parts: Sequence[Stored]

    def load(self) -> Tensor:
        out = torch.empty(self.numel, dtype=self.dtype)
        place = 0
        for part in self.parts:
            part.read_into(out[place : place + part.numel])
            place += part.numel
        if place != self.numel:
            raise CheckpointError(f"{place} elements were stored of a tensor of {self.numel}")
        return out.view(self.shape)


@dataclass(frozen=True, eq=False)
class Tiled(Lazy):
    """Boxes that together fill a tensor, such as shards, each with the position of its first
    corner."""

    tiles: Sequence[tuple[Shape, Lazy]]

    def load(self) -> Tensor:
        if len(self.tiles) == 1 and self.tiles[0][1].shape == self.shape:
            return self.tiles[0][1].load()
        out = torch.empty(self.shape, dtype=self.dtype)
        for corner, tile in self.tiles:
            out[slices_of(corner, tile.shape)].copy_(tile.load())
        return out


def is_tiled_by(shape: Shape, boxes: list[tuple[Shape, Shape]]) -> bool:
    """Whether boxes (start, shape) cover each element of a tensor exactly once. Their edges cut the
    tensor into cells, each of which must belong to one box."""
    boxes = [box for box in boxes if math.prod(box[1])]
    edges = [
        sorted({0, size} | {edge for a, n in boxes for edge in (a[dim], a[dim] + n[dim])})
        for dim, size in enumerate(shape)
    ]
    if any((own[0], own[-1]) != (0, size) for own, size in zip(edges, shape, strict=True)):
        return False
    counts = [len(own) - 1 for own in edges]
    if math.prod(counts) > MOST_CELLS:
        return False
    numbers = [{edge: number for number, edge in enumerate(own)} for own in edges]
    is_taken = torch.zeros(counts, dtype=torch.bool)
    for start, size in boxes:
        where = zip(numbers, start, size, strict=True)
        cells = is_taken[tuple(slice(number[a], number[a + n]) for number, a, n in where)]
        if bool(cells.any()):
            return False
        cells.fill_(True)
    return bool(is_taken.all())


@dataclass(frozen=True, eq=False)
class Changed(Lazy):
    """Another tensor, transformed by a function once it is read."""

    before: Lazy
    change: Callable[[Tensor], Tensor]

    def load(self) -> Tensor:
        after = self.change(self.before.load())
        assert after.shape == self.shape
        assert after.dtype == self.dtype
        return after.contiguous()


@dataclass(frozen=True, eq=False)
class InMemory(Lazy):
    """A small tensor that is in memory, such as a count or a scalar."""

    tensor: Tensor = field(repr=False)

    def load(self) -> Tensor:
        return self.tensor.contiguous()


def held(tensor: Tensor) -> InMemory:
    return InMemory(tuple(tensor.shape), tensor.dtype, tensor.detach())


def num_updates(steps: list[float]) -> dict[str, Lazy]:
    """Returns the optimizer's count of updates as an entry. Overland has one; other formats have
    one per parameter, which differ only for parameters that were frozen for a time."""
    if not steps:
        return {}
    return {NUM_UPDATES: held(torch.tensor(float(max(steps)), dtype=torch.float32))}


def cast_lazily(lazy: Lazy, dtype: torch.dtype) -> Lazy:
    if lazy.dtype == dtype:
        return lazy
    return Changed(lazy.shape, dtype, lazy, lambda tensor: tensor.to(dtype))


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def is_computed(name: str) -> bool:
    """Whether a tensor follows from the config, so that no model has to load it."""
    return name.endswith(COMPUTED)


def config_near(*folders: Path) -> Config:
    """Returns the config.json of the first folder that has one."""
    for folder in folders:
        if (folder / "config.json").is_file():
            refuse_link_out(folder / "config.json")
            return read_object(folder / "config.json", CheckpointError)
    return None


def given_config(path: Path | None) -> Config:
    """Returns the contents of a config.json, given by its path or that of its folder."""
    if path is None:
        return None
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"--config {path}: {file} does not exist")
    return read_object(file, CheckpointError)


def given_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Returns a type of numbers that is given by its name, or by torch: `torch.bfloat16`."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"--dtype {name} is unknown{did_you_mean(name, DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True)
class Options:
    """Options of the target format. `names` and `key_prefix` are for DCP; `partial`: tensors were
    left out on purpose."""

    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    names: str = "hf"
    key_prefix: str | None = None
    partial: bool = False


def split_by_size(tensors: Mapping[str, Lazy], max_bytes: int) -> list[dict[str, Lazy]]:
    """Splits tensors, in order, into files of at most `max_bytes`; a larger tensor gets its own
    file."""
    shards: list[dict[str, Lazy]] = [{}]
    size = 0
    for name, lazy in tensors.items():
        if shards[-1] and size + lazy.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = lazy
        size += lazy.nbytes
    return shards


def write_json(path: Path, contents: Mapping[str, Any]) -> None:
    with new_file(path) as file:
        file.write((json.dumps(contents, indent=2, sort_keys=True) + "\n").encode())


def copy_files(files: Iterable[Path], folder: Path) -> None:
    for file in files:
        if not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
            sync(folder / file.name)


def write_companions(source: LazyCheckpoint, folder: Path) -> None:
    """Writes config.json and tokenizer next to weights in a format that cannot store them, so that
    the folder still describes its model."""
    if source.config is not None:
        write_json(folder / "config.json", source.config)
    copy_files(source.companions, folder)
