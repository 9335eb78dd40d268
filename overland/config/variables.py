"""Variables and home folders in the paths of a config: `$SCRATCH/x`, `${SCRATCH}/x`, `~/x`.

They are resolved once, when a config is loaded. Everything that is written afterwards (the run
folder's config.toml, the config of a submitted job) holds the resolved path, so that a later
session uses the same files whatever its environment. `$$` is a literal `$`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from overland.config.errors import Problem
from overland.config.fields import Key, all_keys
from overland.config.schema import JobConfig

# HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY; not TOKENIZERS_PARALLELISM.
SECRET = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS|APIKEY|KEY)$", re.IGNORECASE
)
VARIABLE = re.compile(
    r"\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<braced>[^}]*)\}|(?P<dollar>\$)|(?P<open>\{.*))"
)
Change = Callable[[str, str], str]
"""Maps the name of a key and its path to another path."""


@dataclass
class Resolved:
    """A config with all variables in paths resolved, and the paths as they were written."""

    config: JobConfig
    written: dict[str, str] = field(default_factory=dict)
    """The original text of the paths that changed, by key."""
    variables: dict[str, str] = field(default_factory=dict)
    """The variables in the paths, with their values."""
    problems: list[Problem] = field(default_factory=list)


def resolve_paths(
    config: JobConfig, env: Mapping[str, str], where: Callable[[str], str] = lambda key: ""
) -> Resolved:
    """Resolves variables and `~` in every key that holds a path; `where` returns where a key is
    set."""
    found = Resolved(config)

    def resolve(dotted: str, text: str) -> str:
        path, names, problem = expand(text, env)
        if problem:
            found.problems.append(Problem(problem, where(dotted), dotted, text))
            return text
        found.variables |= {name: env[name] for name in names}
        if path != text:
            found.written[dotted] = text
        return path

    found.config = with_paths(config, resolve)
    return found


def with_literal_paths(config: JobConfig) -> JobConfig:
    """Returns the config with every `$` in its paths escaped, so that none is read as a
    variable."""
    return with_paths(config, lambda key, path: path.replace("$", "$$"))


def with_paths(config: JobConfig, change: Change) -> JobConfig:
    """Returns the config with each path in it changed."""
    update = {}
    for name in JobConfig.model_fields:
        section = getattr(config, name)
        values = {
            key.attribute: on_paths(key, getattr(section, key.attribute), change)
            for key in all_keys().values()
            if key.section == name and key.has_paths
        }
        update[name] = section.model_copy(update=values)
    return config.model_copy(update=update)


def on_paths(key: Key, value: Any, change: Change) -> Any:
    """Returns the key's value with each path in it changed."""
    if isinstance(value, str):
        return change(key.dotted, value)
    if isinstance(value, dict) and key.table:
        tables = {}
        for name, table in value.items():
            path = (*key.dotted.split("."), name)
            inner = [key.inside((*path, one)) for one in key.table.model_fields]
            changed = {
                one.name: on_paths(one, getattr(table, one.name), change)
                for one in inner
                if one is not None and one.has_paths
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
