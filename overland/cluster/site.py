"""What Overland knows about a cluster: the keys and checks of a site file, one TOML file per site
with the reasons as comments, and where it is found.

The comment above a variable in `[environment]` is copied into every script that sets it, so that
whoever reads the script knows why. Nothing is guessed: what a file does not specify is up to the
user. Site files are looked up in `./sites`, then `~/.config/overland/sites`, then the package; the
first one found is used. The path of a file works in place of a name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from overland.config.errors import ConfigError, Problem
from overland.config.fields import in_words, types_of
from overland.config.paths import SECRET
from overland.config.schema.base import PositiveInt, Section
from overland.config.source import KeyPath, index_lines, nest, place_of, read_toml
from overland.words import control_character, nearest_name


class Limit(Section):
    """The longest walltime for a job of a given size."""

    nodes: PositiveInt | None = None
    """Applies up to this many nodes; if omitted, to any number."""
    time: str
    """HH:MM:SS."""


class Partition(Section):
    """Settings that differ in one partition."""

    devices_per_node: PositiveInt | None = None
    cpus_per_task: PositiveInt | None = None
    """Cores per rank; if omitted, the job divides the node's cores evenly among its ranks."""
    limits: list[Limit] = []
    """Ordered by number of nodes, smallest first; if there are none, --time is required."""


class Slurm(Partition):
    """How jobs are requested from Slurm, in any partition."""

    needs: list[Literal["account", "partition", "qos"]] = []
    """Options that the site requires for every job."""
    gpus: Literal["per-node", "per-task", "none"] = "per-node"
    """per-node: every rank sees all devices of its node; per-task: each rank sees only its own."""
    gpu_bind: str | None = None
    constraint: str | None = None
    exclusive: bool = False
    """Request whole nodes at a site that shares them between jobs."""
    no_chain_in: list[str] = []
    """Partitions and QOS levels in which jobs must not wait for one another."""
    sbatch: list[str] = []
    srun: list[str] = []
    partitions: dict[str, Partition] = {}

    def within(self, name: str | None) -> Partition:
        """Returns what holds in a partition: its own settings, and the site's for the others."""
        special = self.partitions.get(name or "", Partition())
        return Partition(
            devices_per_node=special.devices_per_node or self.devices_per_node,
            cpus_per_task=special.cpus_per_task or self.cpus_per_task,
            limits=special.limits or self.limits,
        )


class SiteDisk(Section):
    """File systems of the site."""

    scratch: str | None = None
    """Root folder for environments, caches and runs, in shell syntax."""
    node_local: str | None = None
    """A node-local disk."""
    node_folders: list[str] = []
    """Folders created on every node before its ranks start."""


class Container(Section):
    """How a command runs inside a container image."""

    command: str | None = None
    """Prefix of the command, with {image} for the image; if omitted, apptainer is used."""
    binds: list[str] = []
    """Host folders that are visible inside the container."""


class Setup(Section):
    """The one-time setup."""

    python: Literal["venv", "conda"] = "venv"
    modules: list[str] = []
    """Modules that only the setup needs, in addition to the job's."""
    rocm: str | None = None
    """Version of the ROCm wheels, if `modules` has no rocm/VERSION, which they follow."""
    gpu_arch: str | None = None
    """GPU architecture that kernels are built for."""
    network_plugin: Literal["module", "build"] | None = None
    """Where RCCL's network plugin comes from: a module, or a build from source."""


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
    """Returns every site file by name; the user's own take precedence over the package's."""
    home = Path(env.get("XDG_CONFIG_HOME") or Path(env.get("HOME", "~")).expanduser() / ".config")
    folders = [Path(__file__).parent / "sites", home / "overland" / "sites", Path("sites")]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def load_site(name: str, env: Mapping[str, str] = os.environ) -> NamedSite:
    """Loads a site by its name or by the path of its file."""
    files = site_files(env)
    path = Path(name).expanduser() if name.endswith(".toml") else files.get(name)
    if path is None or not path.is_file():
        near = nearest_name(name, files)
        known = f" (sites: {', '.join(sorted(files))})" if path is None else ", and no such file"
        raise ConfigError([Problem(f"no such site{known}", "command line", "site", name, near)])
    return read_site(path.read_text(encoding="utf-8"), str(path), path.stem)


def read_site(text: str, shown: str, name: str) -> NamedSite:
    tree = nest(read_toml(text, shown))
    lines = index_lines(text)
    try:
        facts = Site.model_validate(tree)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        raise ConfigError([_problem(detail, lines, shown) for detail in details]) from None
    problems = [
        Problem(message, place_of(path, lines, shown), ".".join(path))
        for path, value in [(("name",), name), *_strings(facts.model_dump(), ())]
        if (message := _not_for_scripts(path, value))
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
    """Returns why a value cannot be inserted into the job and setup scripts, or "" if it can."""
    if letter := control_character("".join((*path, value))):
        return f"contains {letter}, a control character, which would break a line of the script"
    if path[0] == "environment":
        return _bad_variable(path[-1], value)
    if path[0] == "disk" and (not _is_plain(value) or "'" in value):
        return (
            f"expected a path, which may contain $NAMES; {value!r} would break out of its quotes "
            "or run commands"
        )
    if path in (("setup", "rocm"), ("setup", "gpu_arch")) and not re.fullmatch(
        r"[\w.;:+-]+", value
    ):
        return f"expected a single word, got {value!r}"
    return ""


def _bad_variable(name: str, value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        return "is not a valid variable name"
    if SECRET.search(name):
        return "looks like a secret, which must not be in a file; pass it by name with `--env`"
    if not _is_plain(value):
        return "expected plain text and $NAMES; a value must not break its quotes or run commands"
    return ""


def _is_plain(value: str) -> bool:
    """Whether the shell leaves a value as it is between double quotes, apart from variables."""
    return re.search(r'["`\\]|\$\(', value) is None


def _reasons(text: str, lines: Mapping[KeyPath, int]) -> dict[str, list[str]]:
    """Returns the comment lines directly above each variable, without the comment sign."""
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


def _problem(detail: Any, lines: Mapping[KeyPath, int], shown: str) -> Problem:
    path = tuple(str(part) for part in detail["loc"])
    where = place_of(path, lines, shown)
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


def _table(path: tuple[int | str, ...]) -> type[Section] | None:
    """Returns the class of the table at a path."""
    (found,) = types_of(Site)
    for part in path:
        if found.section:
            found, *_ = types_of(found.section.model_fields[str(part)].annotation)
        elif found.items:  # a list or a table of tables: what it holds
            found, *_ = found.items
    return found.section
