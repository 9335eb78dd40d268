"""The config.toml of a run, loaded from another folder than the one the run was started in.

Its relative paths are relative to the start folder, which follows from where the file is and what
its `job.dump_folder` says. They are rewritten, so that the run resumes from anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from overland.config.schema import JobConfig
from overland.config.source import KeyPath
from overland.config.variables import with_paths
from overland.run_folder import CONFIG, METRICS, SESSIONS

IN_THE_RUN_FOLDER = (
    "checkpoint.folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
)


def from_own_folder(
    config: JobConfig, path: Path, shown: str, places: Mapping[KeyPath, str]
) -> tuple[JobConfig, list[str]]:
    """Returns the config with the run folder that `path` is in and absolute paths, and a note; the
    config as it is unless it is the config.toml of a run and names another folder."""
    run, named = path.parent, config.job.dump_folder
    is_from_file = places.get(("job", "dump_folder"), "").startswith(f"{shown}:")
    if path.name != CONFIG or not is_from_file:
        return config, []
    if not any((run / name).exists() for name in (METRICS, SESSIONS)):
        return config, []
    if Path(named).resolve() == run.resolve():
        return config, []
    start = start_folder(run.resolve(), named)

    def here(key: str, text: str) -> str:
        if key == "job.dump_folder":
            return str(run.resolve())
        is_set_here = places.get(tuple(key.split(".")), shown).startswith(shown)
        if start is None or key in IN_THE_RUN_FOLDER or not is_set_here or not text:
            return text
        there = start / text
        return str(without_dots(there)) if there.exists() else text

    note = f"{shown}: resumes the run in {run}; its job.dump_folder is {named!r}"
    note += f", relative to {start} like its other paths" if start else ", where it was before"
    return with_paths(config, here), [note]


def without_dots(path: Path) -> Path:
    """Returns the path without `..`. Symbolic links are resolved only before the last of them: the
    name of a link after it may have the suffix that tells the format."""
    parts = path.parts
    end = max((i + 1 for i, part in enumerate(parts) if part == ".."), default=0)
    return Path(*parts[:end]).resolve().joinpath(*parts[end:]) if end else path


def start_folder(run: Path, named: str) -> Path | None:
    """Returns the folder that `named` leads to `run` from; None if the run has moved since."""
    parts = Path(os.path.normpath(named)).parts
    if not parts or ".." in parts or run.parts[-len(parts) :] != parts:
        return None
    return run.parents[len(parts) - 1]
