"""What Overland knows about a cluster: one TOML file each, with the reasons as comments.

The comment above a variable in `[environment]` is carried into every script that sets it, so that
whoever reads the script knows why. What a file does not say is left to the user; nothing is
guessed. Looked for, the first that is found counts: `./sites`, `~/.config/overland/sites`, the
package. A path of a file works as a name does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError

from overland.config.errors import ConfigError, Problem
from overland.config.fields import in_words
from overland.config.schema import PositiveInt, Section
from overland.config.source import KeyPath, index_lines, nest, read_toml
from overland.config.variables import SECRET
from overland.words import control_character, nearest_name


class Limit(Section):
    """The longest walltime of a job of so many nodes."""

    nodes: PositiveInt | None = None
    """Up to this many nodes; left out: any number."""
    time: str
    """HH:MM:SS."""


class Partition(Section):
    """What is different in one partition."""

    devices_per_node: PositiveInt | None = None
    cpus_per_task: PositiveInt | None = None
    limits: list[Limit] = []


class Slurm(Section):
    """How jobs are asked for."""

    needs: list[Literal["account", "partition", "qos"]] = []
    """What the site refuses a job without."""
    devices_per_node: PositiveInt | None = None
    cpus_per_task: PositiveInt | None = None
    """Cores of one rank; left out: those of the node, shared out evenly by the job itself."""
    gpus: Literal["per-node", "per-task", "none"] = "per-node"
    """per-node: every rank sees all of its node's devices; per-task: its own alone."""
    gpu_bind: str | None = None
    constraint: str | None = None
    exclusive: bool = False
    """Ask for whole nodes, where the site would share them."""
    no_chain_in: list[str] = []
    """Partitions and qualities of service where jobs must not wait for one another."""
    sbatch: list[str] = []
    srun: list[str] = []
    limits: list[Limit] = []
    """By the number of nodes, smallest first; none: --time must be given."""
    partitions: dict[str, Partition] = {}


class SiteDisk(Section):
    """Where things lie."""

    scratch: str | None = None
    """Root for environments, caches and runs, as the shell writes it."""
    node_local: str | None = None
    """A disk of each node's own."""
    node_folders: list[str] = []
    """Made on every node before its ranks start."""


class Container(Section):
    """How a command runs inside an image."""

    command: str | None = None
    """What stands before the command; {image} is the image. Left out: apptainer."""
    binds: list[str] = []
    """Folders of the host that are seen inside."""


class Setup(Section):
    """The one-time set-up."""

    python: Literal["venv", "conda"] = "venv"
    modules: list[str] = []
    """Beside the job's: what only the set-up needs."""
    rocm: str | None = None
    """Version of the ROCm wheels."""
    gpu_arch: str | None = None
    """What kernels are built for."""
    network_plugin: Literal["module", "build"] | None = None
    """RCCL's way to the network: among the modules, or built from source."""


class Site(Section):
    """One cluster."""

    description: str
    accelerator: Literal["nvidia", "amd", "none"]
    scheduler: Literal["slurm", "none"] = "slurm"
    proxies: Literal["off", "keep"] = "keep"
    modules: list[str] = []
    environment: dict[str, str] = {}
    slurm: Slurm = Field(default_factory=Slurm)
    disk: SiteDisk = Field(default_factory=SiteDisk)
    container: Container = Field(default_factory=Container)
    setup: Setup = Field(default_factory=Setup)


@dataclass(frozen=True)
class NamedSite:
    """A site, its name, and the comment above each of its variables."""

    name: str
    facts: Site
    reasons: dict[str, list[str]]


def site_files(env: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Every site by name; the user's own stand before the package's."""
    home = Path(env.get("XDG_CONFIG_HOME") or Path(env.get("HOME", "~")).expanduser() / ".config")
    folders = [Path(__file__).parent / "sites", home / "overland" / "sites", Path("sites")]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def load_site(name: str, env: Mapping[str, str] = os.environ) -> NamedSite:
    """The site of that name, or in that file."""
    files = site_files(env)
    path = Path(name).expanduser() if name.endswith(".toml") else files.get(name)
    if path is None or not path.is_file():
        near = nearest_name(name, files)
        known = f" (sites: {', '.join(sorted(files))})" if path is None else ", and no such file"
        raise ConfigError([Problem(f"no such site{known}", "command line", "site", name, near)])
    return read_site(path.read_text(encoding="utf-8"), str(path), path.stem)


def read_site(text: str, shown: str, name: str) -> NamedSite:
    tree = nest(read_toml(text, shown))
    lines = index_lines(text).lines
    try:
        facts = Site.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        raise ConfigError([_problem(detail, lines, shown) for detail in details]) from None
    problems = [
        Problem(message, f"{shown}:{line}" if line else shown, ".".join(path))
        for path, value in [(("name",), name), *_strings(facts.model_dump(), ())]
        if (message := _not_for_scripts(path, value))
        for line in [_line(path, lines)]
    ]
    if problems:
        raise ConfigError(problems)
    return NamedSite(name, facts, _reasons(text, lines))


def _strings(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _strings(inner, (*path, key))
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner, path)


def _not_for_scripts(path: KeyPath, value: str) -> str:
    """Why a text cannot stand where the scripts of jobs and of the set-up have it; "" if it can."""
    if letter := control_character("".join((*path, value))):
        return f"holds {letter}, a control character, which would end a line of a script"
    if path[0] == "environment":
        return _bad_variable(path[-1], value)
    if path[0] == "disk" and (not _is_plain(value) or "'" in value):
        return f"expected a path, with $NAMES; {value!r} would end its quotes or run commands"
    if path in (("setup", "rocm"), ("setup", "gpu_arch")) and not re.fullmatch(
        r"[\w.;:+-]+", value
    ):
        return f"expected one word, got {value!r}"
    return ""


def _bad_variable(name: str, value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        return "is no name of a variable"
    if SECRET.search(name):
        return "looks like a secret, which must not lie in a file; `--env` passes it on by name"
    if not _is_plain(value):
        return "expected plain text and $NAMES: a value must not end its quotes or run commands"
    return ""


def _is_plain(value: str) -> bool:
    """What stays text between double quotes, except for the values of variables."""
    return re.search(r'["`\\]|\$\(', value) is None


def _reasons(text: str, lines: Mapping[KeyPath, int]) -> dict[str, list[str]]:
    """The comment lines right above each variable, without the comment sign."""
    rows = text.splitlines()
    found: dict[str, list[str]] = {}
    for path, line in lines.items():
        if path[0] != "environment" or len(path) != 2:
            continue
        above: list[str] = []
        while line > 1 and rows[line - 2].startswith("#"):
            line -= 1
            above.insert(0, rows[line - 1].lstrip("# "))
        found[path[1]] = above
    return found


def _line(path: KeyPath, lines: Mapping[KeyPath, int]) -> int | None:
    return next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None)


def _problem(detail: Any, lines: Mapping[KeyPath, int], shown: str) -> Problem:
    path = tuple(str(part) for part in detail["loc"])
    line = _line(path, lines)
    where = f"{shown}:{line}" if line else shown
    owner = _table(detail["loc"][:-1])
    key, fields = ".".join(path), owner.model_fields if owner else {}
    if detail["type"] == "missing":
        return Problem("is missing", where, key)
    if detail["type"] == "extra_forbidden":
        near = nearest_name(path[-1], fields)
        return Problem("unknown key", where, key, detail["input"], near)
    field = fields.get(path[-1])
    words = in_words(field.annotation) if field else detail["msg"].removeprefix("Input should be ")
    return Problem(f"expected {words}", where, key, detail["input"])


def _table(path: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The class of the table that a path leads to."""
    table: Any = Site
    for part in path:
        if isinstance(table, type) and issubclass(table, BaseModel):
            field = table.model_fields.get(str(part))
            table = field.annotation if field else None
        else:  # a list or a table of tables: what it holds
            table = (get_args(table) or (None,))[-1]
    return table if isinstance(table, type) and issubclass(table, BaseModel) else None
