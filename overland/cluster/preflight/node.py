"""Measures a node apart from its devices: clock, versions, disks and network interfaces."""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import overland
from overland.cluster.wire import INTERFACES, Message, Wire, address_of_interface
from overland.errors import ClusterError

ROUND_TRIPS = 8  # the fastest one had the least delay, on the network or in a busy conductor
CLOCK_SECONDS = 5.0
DRIVERS = ("nvidia", "amdgpu")
MIB = 2**20


def measure_clock(wire: Wire) -> Message:
    """Returns the seconds ahead of the conductor, and the error bound of the fastest round trip."""
    best = (float("inf"), 0.0)
    for _ in range(ROUND_TRIPS):
        before = time.time()
        wire.send({"time": None})
        heard = wire.receive(CLOCK_SECONDS)
        after = time.time()
        if not heard or "time" not in heard[0]:
            return {"error": f"no reply from the conductor within {CLOCK_SECONDS:.0f} s"}
        best = min(best, (after - before, (before + after) / 2 - heard[0]["time"]))
    return {"ahead": best[1], "error_bound": best[0] / 2}


def measure_versions(config: str | None, with_torch: bool) -> dict[str, str]:
    """Returns versions by name. Importing torch takes seconds; without it, only its version."""
    found = {
        "overland": overland.__version__,
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "torch": _installed("torch"),
        **_drivers(),
    }
    if with_torch:
        found |= _libraries()
    if config is not None:
        found["config"] = _digest(Path(config))
    return found


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _drivers() -> dict[str, str]:
    paths = {name: Path("/sys/module", name, "version") for name in DRIVERS}
    return {
        f"{name} driver": path.read_text().strip() for name, path in paths.items() if path.exists()
    }


def _libraries() -> dict[str, str]:
    import torch

    found = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    known = {name: str(version) for name, version in found.items() if version is not None}
    if known and torch.distributed.is_nccl_available():
        known["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {"torch": torch.__version__, **known}


def _digest(config: Path) -> str:
    """Returns a digest of the config: nodes with a stale view of a shared file system read another
    file under its name."""
    try:
        return hashlib.sha256(config.read_bytes()).hexdigest()[:16]
    except OSError as error:
        return f"unreadable ({error.strerror})"


def written_folders(run_folder: str) -> dict[str, Path]:
    """Returns the folders that a run writes to: its own, or its nearest existing parent, and the
    node's folder for temporary files, where kernels are cached."""
    run = Path(run_folder).expanduser().absolute()
    while not run.is_dir():
        run = run.parent
    return {"run folder": run, "temporary folder": Path(tempfile.gettempdir())}


def measure_disk(folder: Path, num_bytes: int) -> Message:
    """Measures a disk; an error is an answer too."""
    try:
        space = os.statvfs(folder)
        facts: Message = {"path": str(folder), "free_gib": space.f_bavail * space.f_frsize / 2**30}
        return {**facts, **_write_and_read(folder, num_bytes)}
    except OSError as error:
        return {"path": str(folder), "error": error.strerror or str(error)}


def _write_and_read(folder: Path, num_bytes: int) -> Message:
    """Writes and reads a file that is unlinked at once, so that nothing is ever left behind."""
    descriptor, name = tempfile.mkstemp(prefix=".overland-preflight-", dir=folder)
    try:
        os.unlink(name)
        content = os.urandom(num_bytes)
        start = time.perf_counter()
        written = 0
        while written < num_bytes:
            written += os.write(descriptor, content[written : written + 4 * MIB])
        os.fsync(descriptor)
        middle = time.perf_counter()
        if hasattr(os, "posix_fadvise"):  # otherwise it would be read from the page cache
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        parts = [os.pread(descriptor, 4 * MIB, at) for at in range(0, num_bytes, 4 * MIB)]
        end = time.perf_counter()
    finally:
        os.close(descriptor)
    return {
        "right": b"".join(parts) == content,
        "write_gb_per_s": num_bytes / (middle - start) / 1e9,
        "read_gb_per_s": num_bytes / (end - middle) / 1e9,
    }


def measure_interfaces(env: Mapping[str, str] = os.environ) -> Message:
    """Returns addresses by interface name, and a sentence for each interface that is missing or has
    none. Every name counts, since NCCL uses all that are listed."""
    addresses: dict[str, str] = {}
    problems: list[str] = []
    for variable in INTERFACES:
        words = env.get(variable, "")
        if words.startswith("^"):  # names interfaces to exclude; any other will do
            continue
        for name in filter(None, words.lstrip("=").split(",")):
            try:
                addresses[name] = address_of_interface(name, variable)
            except ClusterError as error:
                problems.append(str(error))
    return {"addresses": addresses, "problems": problems}
