"""What a node runs, and the config as this node reads it."""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata
from pathlib import Path

import overland

DRIVERS = ("nvidia", "amdgpu")


def measure(config: str | None, with_torch: bool) -> dict[str, str]:
    """By name. Of torch without its import, which takes seconds, there is the version alone."""
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
    """Nodes whose view of a shared file system is stale read another file under its name."""
    try:
        return hashlib.sha256(config.read_bytes()).hexdigest()[:16]
    except OSError as error:
        return f"cannot be read ({error.strerror})"
