"""The training stub's four files: model_state_dict.pt and its companions. `checkpoint.type = full`
writes them with `checkpoint.full_format = "torch"`, and a run resumes from them alone, written by
us or by the stub: they are first copied into a checkpoint of the run, and are not changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from overland.apps.convert.formats.files import Options
from overland.apps.convert.formats.lazy import Stored
from overland.apps.convert.formats.overland import as_lazy_checkpoint, write_overland
from overland.apps.convert.formats.torch import PROGRESS, WEIGHTS, open_torch, write_torch
from overland.checkpoint.folder import set_aside
from overland.checkpoint.format import BLOCK, FileInfo, Index, Part, TensorEntry, checksum
from overland.checkpoint.lazy import LazyCheckpoint
from overland.checkpoint.read import CheckpointReader
from overland.checkpoint.write import commit
from overland.errors import CheckpointError
from overland.files import Disk, Moved, ignore
from overland.run_folder import COMMITTED, checkpoint_name


def is_four_files(path: Path) -> bool:
    return (path / WEIGHTS).is_file() and not (path / COMMITTED).is_file()


def open_four_files(path: Path) -> LazyCheckpoint:
    """Opens the four files; raises if their step is not a valid number."""
    source = open_torch(path)
    step = source.extras.get("step", 0)
    if not isinstance(step, int) or step < 0:
        raise CheckpointError(
            f"{path / PROGRESS} has step {step!r:.40}, expected an integer of at least 0"
        )
    return source


def adopt(path: Path, checkpoints: Path, disk: Disk) -> Path:
    """Writes the contents of the files as a checkpoint, and returns its path."""
    source = open_four_files(path)
    target = checkpoints / checkpoint_name(source.extras.get("step", 0))
    beside = checkpoints / f".{target.name}.tmp"
    disk.make_folder(checkpoints)
    disk.remove_folder(beside)
    write_overland(source, beside, Options())
    if target.exists():
        set_aside(target, disk)
    disk.rename(beside, target)
    return target


def write_four_files(
    parts: CheckpointReader,
    folder: Path,
    about: dict[str, Any],
    disk: Disk,
    moved: Moved = ignore,
) -> None:
    """Writes model_state_dict.pt and its companions. Tensors are plain bytes in such files, so an
    index can point to them, and we read and verify them like our own."""
    disk.make_folder(folder)
    write_torch(as_lazy_checkpoint(parts, with_random_state=True), folder)
    disk.sync_folder(folder)
    tensors: dict[str, TensorEntry] = {}
    for name, lazy in open_torch(folder).tensors.items():
        assert isinstance(lazy, Stored), name
        sums = tuple(_checksums(lazy.path, lazy.offset, lazy.nbytes, moved))
        part = Part(lazy.path.name, lazy.offset, (0,) * len(lazy.shape), lazy.shape, sums)
        tensors[name] = TensorEntry(lazy.dtype, lazy.shape, [part] if lazy.nbytes else [])
    files = {path.name: _file_info(path, moved) for path in sorted(folder.iterdir())}
    index = Index("full", parts.index.world_size, tensors, files, parts.run)
    commit(folder, index, about, disk)


def _file_info(path: Path, moved: Moved) -> FileInfo:
    """Returns the checksums of a whole file: a zip holds more than tensors."""
    size = path.stat().st_size
    return FileInfo(size, 0, checksum(b""), tuple(_checksums(path, 0, size, moved)))


def _checksums(path: Path, offset: int, num_bytes: int, moved: Moved) -> Iterator[int]:
    with path.open("rb") as file:
        file.seek(offset)
        for begin in range(0, num_bytes, BLOCK):
            block = file.read(min(BLOCK, num_bytes - begin))
            moved(len(block))
            yield checksum(block)
