"""Keeps compiled code in the run folder, so that the next session starts warm.

Compilers cache their output on the node, usually in /tmp, which clusters empty after each job. In
the run folder there is one file per compiler and pipeline stage, written whole by the stage's first
rank and read by one rank for all: no locks, and no thousands of small files that every rank
requests from a parallel file system. Entries are found by a hash of code, shapes, device and
version, so that several nodes, devices and versions can share a file, and stale entries do no harm.
"""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from overland.checkpoint.plan import broadcast
from overland.files import replace_file
from overland.training.callbacks import Callback

if TYPE_CHECKING:
    from overland.training.run import Run

COMPILED, KERNELS = "compiled.bin", "kernels.tar"
MOST_BYTES = 2**29  # of kernels, so that a cache that grew for years is not copied
SAVED_AFTER = 2  # steps, by when every kernel of a step has run


class CompileCache(Callback):
    """Keeps the output of torch.compile."""

    def __init__(self, run: Run) -> None:
        self.path = path_of(run, COMPILED)
        self.is_saved = not is_first_of_stage(run)

    def on_start(self, run: Run) -> None:
        made = read_for_all(run, COMPILED)[stage_of(run)]
        if not made:
            return
        try:
            torch.compiler.load_cache_artifacts(made)
        except (
            Exception
        ) as error:  # from another torch version, or incomplete; everything is compiled again
            run.call("on_message", f"{self.path} cannot be used: {error!r}")

    def on_step(self, run: Run) -> None:
        if self.is_saved:
            return
        self.is_saved = True
        made = torch.compiler.save_cache_artifacts()
        if made is not None:
            write_cache(run, self.path, made[0])


class KernelCache(Callback):
    """Keeps the kernels that Triton compiled for us, which torch.compile does not know about. One
    rank of each node puts them where Triton looks for them."""

    def __init__(self, run: Run) -> None:
        self.path, self.steps = path_of(run, KERNELS), 0
        self.is_writer = is_first_of_stage(run)
        self.began = time.time()
        self.kept: dict[str, bytes] = {}

    def on_start(self, run: Run) -> None:
        for stage, packed in enumerate(read_for_all(run, KERNELS)):
            try:
                kernels = unpacked_tar(packed)
                if run.world.local_rank == 0:
                    put(kernels, triton_folder())
            except (OSError, ValueError, tarfile.TarError) as error:
                run.call("on_message", f"cached kernels cannot be used: {error!r}")
                continue
            if stage == stage_of(run):
                self.kept = kernels
        # So that no rank compiles a kernel that another is about to put there.
        broadcast(None, run.store.group)

    def on_step(self, run: Run) -> None:
        self.steps += 1
        if not self.is_writer or self.steps != SAVED_AFTER:
            return
        made = kernels_in(triton_folder(), self.began)
        kernels = {**self.kept, **made}
        if made.keys() - self.kept.keys() and sum(map(len, kernels.values())) <= MOST_BYTES:
            write_cache(run, self.path, packed_as_tar(kernels))


def stage_of(run: Run) -> int:
    """Returns the pipeline stage of this rank: each stage compiles its own code."""
    return run.world.rank * run.mesh.degrees.pp // run.world.size


def is_first_of_stage(run: Run) -> bool:
    return run.world.rank % (run.world.size // run.mesh.degrees.pp) == 0


def path_of(run: Run, name: str) -> Path:
    return run.folder.root / stage_file(name, stage_of(run))


def stage_file(name: str, stage: int) -> str:
    first, ending = name.split(".")
    return name if stage == 0 else f"{first}_{stage}.{ending}"


def read_for_all(run: Run, name: str) -> list[bytes]:
    """Returns the files of all stages, read by rank 0; empty bytes for one that is missing. Files
    owned by another user are ignored."""
    read = []
    for stage in range(run.mesh.degrees.pp):
        path = run.folder.root / stage_file(name, stage)
        try:
            is_ours = run.world.is_first and path.stat().st_uid == os.getuid()
            read.append(path.read_bytes() if is_ours else b"")
        except OSError:
            read.append(b"")
    return broadcast(read, run.store.group)


def write_cache(run: Run, path: Path, data: bytes) -> None:
    """Writes a file, or reports why it could not: a full disk costs the next session some time, but
    must not end this one."""
    try:
        replace_file(path, data, durable=False)
    except OSError as error:
        run.call("on_message", f"{path} was not written: {error.strerror}")


def triton_folder() -> Path:
    """Returns the folder where Triton keeps its kernels."""
    home = os.environ.get("TRITON_HOME") or "~"
    return Path(os.environ.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache").expanduser()


# Triton's group file lists the files of one kernel by their absolute paths.
GROUP, PLACE = "__grp__", b"{overland:kernels}"


def kernels_in(folder: Path, since: float) -> dict[str, bytes]:
    """Returns the files in Triton's cache written since then, by `hash/name`."""
    found = {}
    for path in folder.glob("*/*"):
        try:
            if path.is_file() and path.name != "lock" and path.stat().st_mtime >= since:
                data = path.read_bytes()
                is_group = path.name.startswith(GROUP)
                found[f"{path.parent.name}/{path.name}"] = (
                    data.replace(bytes(folder), PLACE) if is_group else data
                )
        except OSError:  # replaced or removed in the meantime
            continue
    return found


def put(kernels: Mapping[str, bytes], folder: Path) -> None:
    """Writes each file atomically, and leaves existing ones alone. Group files come last, since
    they refer to the others."""
    for name in sorted(kernels, key=lambda name: GROUP in name):
        path, data = folder / name, kernels[name]
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            data = data.replace(PLACE, bytes(folder)) if GROUP in name else data
            replace_file(path, data, shared=True, durable=False)


def packed_as_tar(kernels: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in kernels.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return file.getvalue()


def unpacked_tar(packed: bytes) -> dict[str, bytes]:
    """Returns the regular files two levels deep. Raises ValueError for any other entry, such as a
    path that leads elsewhere."""
    kernels: dict[str, bytes] = {}
    if not packed:
        return kernels
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as tar:
        for entry in tar:
            parts = entry.name.split("/")
            if not entry.isfile() or len(parts) != 2 or {"", ".", ".."} & set(parts):
                raise ValueError(f"{entry.name!r} is not a kernel file")
            file = tar.extractfile(entry)
            assert file is not None
            kernels[entry.name] = file.read()
    return kernels
