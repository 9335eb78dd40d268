"""The paths in a config: their variables and home folders (`$SCRATCH/x`, `${SCRATCH}/x`, `~/x`),
and those of a run that is resumed from a different folder than it was started in.

Variables are resolved once, when a config is loaded. Everything that is written afterwards (the run
folder's config.toml, the config of a submitted job) holds the resolved path, so that a later
session uses the same files whatever its environment. `$$` is a literal `$`.

Relative paths in the config.toml of a run are relative to its start folder, which follows from
where the file is and what its `job.dump_folder` says. They are rewritten, so that the run resumes
from anywhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from overland.config.errors import Problem
from overland.config.fields import Key, all_keys
from overland.config.schema import JobConfig
from overland.config.source import KeyPath
from overland.run_folder import CONFIG, METRICS, SESSIONS

# HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY; not TOKENIZERS_PARALLELISM.
SECRET = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS|APIKEY|KEY)$", re.IGNORECASE
)
VARIABLE = re.compile(
    r"\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<braced>[^}]*)\}|(?P<dollar>\$)|(?P<open>\{.*))"
)
Change = Callable[[str, str], str]
"""Maps the name of a key and its path to another path."""


def resolve_paths(
    config: JobConfig, env: Mapping[str, str], where: Callable[[str], str]
) -> tuple[JobConfig, dict[str, str], dict[str, str], list[Problem]]:
    """Resolves variables and `~` in every key that holds a path; `where` returns where a key is
    set. Returns the config; the original text of the paths that changed, by key; the variables in
    them, with their values; and problems."""
    written: dict[str, str] = {}
    variables: dict[str, str] = {}
    problems: list[Problem] = []

    def resolve(dotted: str, text: str) -> str:
        path, names, problem = expand(text, env)
        if problem:
            problems.append(Problem(problem, where(dotted), dotted, text))
            return text
        variables.update({name: env[name] for name in names})
        if path != text:
            written[dotted] = text
        return path

    return with_paths(config, resolve), written, variables, problems


def with_paths(config: JobConfig, change: Change) -> JobConfig:
    """Returns the config with each path in it changed."""
    return config.having(
        {
            name: on_paths(key, config.value(name), change)
            for key in all_keys().values()
            if key.has_paths and (name := f"{key.section}.{key.attribute}")
        }
    )


def on_paths(key: Key, value: Any, change: Change) -> Any:
    """Returns the key's value with each path in it changed."""
    if isinstance(value, str):
        return change(key.dotted, value)
    if isinstance(value, dict) and key.table:
        tables = {}
        for name, table in value.items():
            changed = {
                inner: on_paths(one, getattr(table, inner), change)
                for inner, one in key.inside(name).items()
                if one.has_paths
            }
            tables[name] = table.model_copy(update=changed)
        return tables
    if isinstance(value, dict):
        return {name: change(f"{key.dotted}.{name}", path) for name, path in value.items()}
    return value


def expand(text: str, env: Mapping[str, str]) -> tuple[str, list[str], str]:
    """Returns the resolved path, the variables in it, and what is wrong with it, if anything."""
    names, problems = [], []

    def value(found: re.Match[str]) -> str:
        if found["dollar"]:
            return "$"
        if found["open"]:
            problems.append(f"expected ${{NAME}}, not {found[0]}; the closing brace is missing")
            return found[0]
        name = found["plain"] or found["braced"]
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            problems.append(f"expected ${{NAME}}, not {found[0]}; write $$ for a literal $")
        elif SECRET.search(name):
            problems.append(f"${name} looks like a secret, which must not be part of a path")
        elif not env.get(name):
            problems.append(
                f"the variable {name} is not set here; `export {name}=…`, or write the path out "
                "($$ is a literal $)"
            )
        names.append(name)
        return env.get(name, "")

    path = VARIABLE.sub(value, text)
    if text.startswith("~") and not problems:
        path = os.path.expanduser(path)
        if path.startswith("~"):
            problems.append(f"~{path.split('/')[0][1:]}: there is no such user")
    return path, names, "; ".join(dict.fromkeys(problems))


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
