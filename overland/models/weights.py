"""Loads this rank's slices of a model's weights from a Hugging Face folder of safetensors, and
decides how rows for new tokens are initialized. Such a folder has one file, or several and an
index.

Only the slice that this rank needs is read, one tensor at a time. Conversions read the same folders
with `overland.apps.convert.formats.hf`, which also writes them.

Rows for new tokens in the embedding and the output matrix start as the mean of the trained rows, so
that a new token is initially as likely as the average one. (With random values it could be more
likely than all others.)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from overland.errors import ModelError
from overland.files import CHECKSUMS, checksums_of, read_json, what_is_wrong
from overland.kernels.nf4 import pack
from overland.models.flops import outline_of
from overland.models.init import LocalPart, persistent_buffers, plain_name, whole
from overland.models.nf4 import narrow_matrices
from overland.models.registry import has_builder
from overland.models.structure import Role, ties_of, walk_roles
from overland.models.transform import added_rule
from overland.words import first_few

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
READ_BYTES = 1 << 24  # at a time, but at least a row
ROWS_AT_ONCE = 4096  # in any layout, so that the mean has the same bits everywhere


def load_hf(
    model: nn.Module,
    folder: str | Path,
    local_part: LocalPart = whole,
    strict: bool = True,
    moved: Callable[[int], None] = lambda num_bytes: None,
    only: Collection[str] | None = None,
    new_rows: NewRows | None = None,
) -> None:
    """Fills the model's parameters from a folder of safetensors, cast to the parameters' dtypes,
    including 4 bits.

    The model may be a part of the whole (a pipeline stage, shards through `local_part`). A tensor
    that is missing or has another shape is always an error; with `strict`, so are tensors in the
    files that no part of the model needs, if its config is known. `moved` is called with the number
    of bytes as they are read; `only` names the parameters to load. `new_rows` belong to tokens that
    the folder's model was not trained with, and may be missing.
    """
    folder = Path(folder)
    file_of = _files_by_tensor(folder)
    ties = ties_of(model)
    named = {plain_name(name): tensor for name, tensor in model.named_parameters()}
    parameters = {n: p for n, p in named.items() if added_rule(model, n) is None}
    buffers = {n: b for n, b in persistent_buffers(model).items() if n in file_of}
    wanted: dict[str, Tensor] = {**parameters, **buffers}
    if only is not None:
        wanted = {name: tensor for name, tensor in wanted.items() if ties.get(name, name) in only}
    other_names = getattr(model, "other_names", lambda name: ())
    source = {name: _source(name, file_of, ties, other_names(name)) for name in wanted}

    missing = [name for name in wanted if source[name] not in file_of]
    if missing:
        raise ModelError(f"{folder} lacks {first_few(missing)}, which this model needs")
    config = getattr(model, "config", None)
    if strict and has_builder(config):  # a module may keep another library's config there
        known = {*outline_of(config)[1], *source.values(), *ties}
        unexpected = [n for n in file_of if n not in known and not n.endswith("inv_freq")]
        if unexpected:
            raise ModelError(
                f"{folder} has {first_few(unexpected)}, which this model does not have"
            )

    vocabulary = vocabulary_matrices(model) if new_rows is not None else set()
    narrow = {plain_name(name): columns for name, columns in narrow_matrices(model).items()}
    for file in dict.fromkeys(file_of[source[name]] for name in wanted):
        names = [name for name in wanted if file_of[source[name]] == file]
        with _open(folder / file) as tensors, torch.no_grad():
            sums = checksums_of(folder / file, ModelError) or {}
            for name in names:
                for num_bytes in _read(
                    tensors,
                    source[name],
                    wanted[name],
                    local_part,
                    folder / file,
                    new_rows if name in vocabulary else None,
                    narrow.get(name),
                    sums.get(source[name]),
                ):
                    moved(num_bytes)


def weight_files(folder: Path) -> list[str]:
    """Returns the weight files in a folder, and their index if there is one."""
    index = [INDEX] if (folder / INDEX).is_file() else []
    return [*index, *dict.fromkeys(_files_by_tensor(folder).values())]


def read_index(index: Path, error: type[Exception] = ModelError) -> dict[str, str]:
    """Returns which file holds each tensor, from the index of a folder; raises this error if a file
    is missing."""
    try:
        file_of: dict[str, str] = read_json(index)["weight_map"]
        files = list(file_of.values())
    except (ValueError, KeyError, TypeError, AttributeError) as why:
        raise error(f"{index} is not an index of weights: {what_is_wrong(why)}") from why
    for file in files:
        if not isinstance(file, str) or file != Path(file).name or file in ("", ".."):
            raise error(
                f"{index} names {file!r:.100}, which is not a plain file name in the same folder"
            )
    absent = sorted({file for file in files if not (index.parent / file).is_file()})
    if absent:
        raise error(f"{index.parent} lacks {first_few(absent)}, which its index names")
    return file_of


def _files_by_tensor(folder: Path) -> dict[str, str]:
    if (folder / INDEX).is_file():
        return read_index(folder / INDEX)
    if (folder / SINGLE).is_file():
        with _open(folder / SINGLE) as tensors:
            return dict.fromkeys(tensors.keys(), SINGLE)
    hint = ""
    if folder.is_dir() and any(folder.glob("pytorch_model*.bin")):
        hint = " (pytorch_model.bin can run code when loaded: convert it to safetensors first)"
    raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")


def _source(
    name: str, file_of: dict[str, str], ties: Mapping[str, str], other_names: Sequence[str]
) -> str:
    """Returns the tensor in the files that holds this parameter; for tied parameters, any of
    them."""
    owner = ties.get(name, name)
    alike = [owner, *(tied for tied in ties if ties[tied] == owner), *other_names]
    return next((one for one in alike if one in file_of), name)


def _read(
    tensors: Any,
    source: str,
    parameter: Tensor,
    local_part: LocalPart,
    file: Path,
    new_rows: NewRows | None = None,
    narrow: int | None = None,
    crc32: int | None = None,
) -> Iterator[int]:
    """Fills a parameter, some rows at a time; yields the number of bytes read. For a parameter
    stored in 4 bits, `narrow` is its number of columns. A known checksum is verified if the whole
    tensor is read."""
    target, offsets, full_shape = local_part(parameter)
    if narrow is not None:
        full_shape = (full_shape[0], narrow)
    try:
        stored = tensors.get_slice(source)
    except SafetensorError as error:
        raise ModelError(f"{file} does not hold {source}, which its index lists") from error
    shape = tuple(stored.get_shape())
    is_smaller = new_rows is not None and new_rows.fits(shape, tuple(full_shape))
    if shape != tuple(full_shape) and not is_smaller:
        raise ModelError(
            f"{source} in {file} has shape {list(shape)}, but the model expects {list(full_shape)}"
        )
    if target.numel() == 0:
        return
    if target.is_meta:
        raise ModelError(f"{source} is on the meta device; call to_empty() before loading")
    if not shape:  # safetensors cannot slice a scalar
        target.copy_(tensors.get_tensor(source))
        yield target.nbytes
        return
    ends = (offset + size for offset, size in zip(offsets, target.shape, strict=True))
    rows, *columns = (slice(a, b) for a, b in zip(offsets, ends, strict=True))
    there = target[: max(0, shape[0] - rows.start)]
    is_whole = len(there) == shape[0] and (narrow is not None or target.shape[1:] == shape[1:])
    found = 0
    for part in (
        there.split(max(1, READ_BYTES * len(target) // target.nbytes)) if len(there) else ()
    ):
        stop = rows.start + len(part)
        read = stored[(slice(rows.start, stop), *(columns if narrow is None else ()))]
        if is_whole and crc32 is not None:
            found = zlib.crc32(read.reshape(-1).view(torch.uint8).numpy(), found)
        part.copy_(read if narrow is None else pack(read.to(part.device)))
        rows = slice(stop, rows.stop)
        yield part.nbytes
    if is_whole and crc32 is not None and found != crc32:
        raise ModelError(f"{file} is damaged: {source} does not match {CHECKSUMS} next to it")
    if new_rows is not None:
        new_rows.fill(target, offsets[0], shape[0], lambda a, b: stored[(slice(a, b), *columns)])


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        tensors = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {path} as safetensors: {error}") from error
    with tensors:
        yield tensors


@dataclass(frozen=True)
class NewRows:
    """The ids of new tokens. Rows before them were trained; rows that are only padding stay
    unchanged."""

    start: int
    stop: int

    def fits(self, stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
        """Whether a stored matrix is the wanted one without its last rows."""
        return stored[1:] == wanted[1:] and stored[0] <= wanted[0]

    def fill(
        self, shard: Tensor, first: int, num_stored: int, read: Callable[[int, int], Tensor]
    ) -> None:
        """Fills the new rows of a shard that begins at row `first`. `read` returns a range of the
        `num_stored` stored rows."""
        rows = torch.arange(first, first + len(shard), device=shard.device)
        is_new = ((rows >= self.start) & (rows < self.stop)) | (rows >= num_stored)
        if not is_new.any():
            return
        trained = min(self.start, num_stored)
        total = torch.zeros(shard.shape[1:], dtype=torch.float64)
        for begin in range(0, trained, ROWS_AT_ONCE):
            total += read(begin, min(begin + ROWS_AT_ONCE, trained)).double().sum(dim=0)
        shard[is_new] = (total / max(trained, 1)).to(shard)


def vocabulary_matrices(model: nn.Module) -> set[str]:
    """Returns the names of the parameters that have a row for each token."""
    return {f"{path}.weight" for path, role in walk_roles(model) if role is Role.VOCABULARY}
