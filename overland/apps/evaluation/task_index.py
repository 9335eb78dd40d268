"""Caches the harness's index of its 14,000 task definitions, since reading them all takes 15
seconds.

The cache is in XDG_CACHE_HOME and is keyed by the version of the harness and the names, sizes and
times of the files. If it cannot be written, the definitions are read each time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from overland.data.sources.marks import digest_of
from overland.files import replace_file

FORMAT = 1


@contextmanager
def kept_index() -> Iterator[None]:
    """Makes TaskManager use the cached index within this context."""
    from lm_eval.tasks._index import TaskIndex

    original = TaskIndex.build

    def build(paths: Iterable[Path], **options: Any) -> dict[str, Any]:
        paths = list(paths)
        place = place_for(paths)
        found = read_index(place)
        if found is None:
            found = original(paths, **options)
            write_index(place, found)
        return found

    TaskIndex.build = staticmethod(build)
    try:
        yield
    finally:
        TaskIndex.build = staticmethod(original)


def place_for(paths: list[Path]) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    files = [mark for path in paths for mark in marks(path)]
    key = digest_of([FORMAT, version("lm_eval"), [str(path) for path in paths], files])
    return Path(root) / "overland" / f"tasks-{key[:16]}.json"


def marks(root: Path) -> Iterator[tuple[str, int, int]]:
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            if name.endswith((".yaml", ".yml")) or "." not in name:  # files that others include
                stat = os.stat(os.path.join(folder, name))
                yield os.path.join(folder, name), stat.st_size, stat.st_mtime_ns


def read_index(place: Path) -> dict[str, Any] | None:
    from lm_eval.tasks._index import Entry, Kind

    with suppress(OSError, ValueError, KeyError, TypeError):
        return {
            one["name"]: Entry(
                one["name"],
                Kind[one["kind"]],
                Path(one["path"]) if one["path"] else None,
                one["config"],
                set(one["tags"]),
            )
            for one in json.loads(place.read_text("utf-8"))
        }
    return None


def write_index(place: Path, index: dict[str, Any]) -> None:
    entries = [
        {
            "name": name,
            "kind": entry.kind.name,
            "path": None if entry.yaml_path is None else str(entry.yaml_path),
            "config": entry.cfg,
            "tags": sorted(entry.tags),
        }
        for name, entry in index.items()
    ]
    with suppress(OSError, ValueError, TypeError):
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, json.dumps(entries, default=str))
