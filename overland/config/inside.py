"""Whether a file belongs to the folder that it is listed in."""

from __future__ import annotations

from pathlib import Path


def leads_out(path: Path, folder: Path) -> bool:
    """Whether links take `path` out of `folder`. A snapshot in Hugging Face's cache consists of
    links to the blobs beside it, which belong to it."""
    folder = folder.resolve()
    roots = [folder]
    if folder.parent.name == "snapshots":
        roots.append(folder.parent.parent / "blobs")
    return not any(path.resolve().is_relative_to(root) for root in roots)
