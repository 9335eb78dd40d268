"""The harness's index of its 14,000 task definitions, cached since reading them all takes 15
seconds.

The cache is in XDG_CACHE_HOME and is keyed by the version of the harness and the names, sizes and
times of the files. If it cannot be written, the definitions are read each time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from overland.data.sources.file_marks import digest_of
from overland.errors import DataError
from overland.files import replace_file
from overland.plugins import need
from overland.words import did_you_mean

FORMAT = 1


@lru_cache(maxsize=1)
def open_manager(names: tuple[str, ...], include_path: Path | None = None) -> Any:
    """Returns the harness's index of tasks. Its built-in index is large, and is skipped if all
    names are in `include_path`."""
    need("lm_eval", "a task", "eval")
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        if not include_path.is_dir():
            raise DataError(f"--include-path {include_path} is not a folder of task definitions")
        own = TaskManager(include_path=str(include_path), include_defaults=False)
        if all(own.match_tasks([name]) or is_file(name) for name in names):
            return own
    with kept_index():
        return TaskManager(include_path=None if include_path is None else str(include_path))


def is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and Path(name).expanduser().is_file()


def matching(manager: Any, names: Iterable[str]) -> list[str]:
    """Returns the matching tasks, groups and tags; `*` matches anything."""
    found: list[str] = []
    for name in names:
        some = [name] if is_file(name) else manager.match_tasks([name])
        if not some:
            near = did_you_mean(name, manager.all_tasks)
            if len(manager.all_tasks) > 50 and "did you mean" not in near:
                near = "; `lm_eval ls tasks` lists those of the harness"
            raise DataError(f"there is no task '{name}'{near}")
        found += some
    return list(dict.fromkeys(found))


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
