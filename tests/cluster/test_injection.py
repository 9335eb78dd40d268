"""No text of a site, a flag or a path becomes a command of a script."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from overland.cli.main import app
from overland.cluster.job import JobRequest, RunPlace, plan_job
from overland.cluster.script import render_job, render_setup
from overland.cluster.site import read_site
from overland.config.errors import ConfigError
from overland.errors import ClusterError
from tests.cluster.scripts import place

# Each writes a file if a shell takes it for more than a text.
PAYLOADS = [
    "a\ntouch pwned\n", "a\rtouch pwned", "a\u2028touch pwned", "$(touch pwned)", "`touch pwned`",
    "a; touch pwned #", "a' ; touch pwned ; '", 'a" ; touch pwned ; "', "a } ; touch pwned",
    "a) ; touch pwned ; (", "a && touch pwned", "a\\", "a' \"",
]  # fmt: skip
# Commands by their nature: a site's own way to start a container.
COMMANDS = {("container", "command")}


def toml(value: Any) -> str:
    """A TOML string may hold anything, escaped."""
    return '"' + "".join(
        f"\\u{ord(c):04x}" if c in '"\\' or not c.isprintable() else c for c in value
    ) + '"'  # fmt: skip


def site_with(spot: tuple[str, ...], text: str, scheduler: str, python: str) -> str:
    """A site's file with every string that there is, one of them replaced."""

    def put(*path: str, otherwise: str) -> str:
        return toml(text if path == spot else otherwise)

    return f"""
description = {put("description", otherwise="a cluster")}
accelerator = "amd"
scheduler = "{scheduler}"
modules = [{put("modules", otherwise="rocm/7")}]
[environment]
# Why.
COLOR = {put("environment", otherwise="red")}
[slurm]
devices_per_node = 2
gpu_bind = {put("slurm", "gpu_bind", otherwise="closest")}
constraint = {put("slurm", "constraint", otherwise="gpu")}
no_chain_in = [{put("slurm", "no_chain_in", otherwise="debug")}]
sbatch = [{put("slurm", "sbatch", otherwise="--mail-type=END")}]
srun = [{put("slurm", "srun", otherwise="--exact")}]
[[slurm.limits]]
time = {put("slurm", "limits", otherwise="02:00:00")}
[disk]
scratch = {put("disk", "scratch", otherwise="$HOME/scratch")}
node_local = {put("disk", "node_local", otherwise="$HOME/node")}
node_folders = [{put("disk", "node_folders", otherwise="$HOME/cache")}]
[container]
binds = [{put("container", "binds", otherwise="/data")}]
[setup]
python = "{python}"
modules = [{put("setup", "modules", otherwise="conda")}]
rocm = {put("setup", "rocm", otherwise="7.2")}
gpu_arch = {put("setup", "gpu_arch", otherwise="gfx90a")}
network_plugin = "build"
"""


SPOTS = [
    ("name",), ("description",), ("modules",), ("environment",), ("slurm", "gpu_bind"),
    ("slurm", "constraint"), ("slurm", "no_chain_in"), ("slurm", "sbatch"), ("slurm", "srun"),
    ("slurm", "limits"), ("disk", "scratch"), ("disk", "node_local"), ("disk", "node_folders"),
    ("container", "binds"), ("setup", "modules"), ("setup", "rocm"), ("setup", "gpu_arch"),
]  # fmt: skip
FLAGS = [one.name for one in fields(JobRequest) if "str" in str(one.type)]
PATHS = [one.name for one in fields(RunPlace) if "Path" in str(one.type) or one.name == "python"]


def scripts(spot: tuple[str, ...], text: str) -> Iterator[str]:
    """Every script that the text would stand in."""
    for scheduler in ("slurm", "none"):
        for kind in ("conda", "venv"):
            name = text if spot == ("name",) else "here"
            site = read_site(site_with(spot, text, scheduler, kind), "here.toml", name)
            yield render_setup(site)
            wanted = JobRequest(nodes=1, container="/image.sif" if kind == "venv" else None)
            if kind == "conda" and scheduler == "slurm":
                wanted = replace(wanted, packed_env="/env.tar.gz", nodes=2)
            where = replace(place(Path("/nowhere")), setup=Path("/setup.sh"))
            if spot[0] == "--":
                given: Any = (text,) if spot[1] == "env" else text
                given = f"--comment={text}" if spot[1] == "sbatch" else given
                wanted = replace(wanted, **{spot[1]: given})
            if spot[0] == "path":
                changed: Any = text if spot[1] == "python" else Path("/nowhere") / text
                where = replace(where, **{spot[1]: changed})
            yield render_job(plan_job(site, wanted, where))


def run(text: str, folder: Path) -> None:
    """As bash would, where only a few harmless commands are to be found."""
    tools, env = folder / "bin", folder / "scratch" / "envs" / "overland" / "bin"
    stubs = [tools / tool for tool in ("srun", "sbcast", "squeue", "scontrol", "conda", "git")]
    stubs += [env / tool for tool in ("python", "pip", "conda-pack")]
    stubs += [folder / "node" / "overland-env-1" / "bin" / "python"]
    stubs += [tools / "make", folder / "autogen.sh", folder / "configure"]
    for stub in stubs:
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text("#!/bin/bash\nexit 0\n")
        stub.chmod(0o755)
    for tool in ("touch", "cat", "env", "date"):
        (tools / tool).symlink_to(shutil.which(tool) or tool)
    script = folder / "script.sh"
    # Functions, so that the script changes nothing and stays in this folder, whatever it names.
    script.write_text(
        "module() { :; }; cd() { :; }; exec() { :; }; mkdir() { :; }; rm() { :; }; "
        "mktemp() { echo build; }\n" + text
    )
    variables = {"PATH": str(tools), "HOME": str(folder), "SLURM_JOB_ID": "1"}
    variables |= {"SLURM_CPUS_ON_NODE": "4", "SLURM_JOB_NUM_NODES": "2"}
    variables |= dict.fromkeys(("BUILD_PLUGIN", "BUILD_FLASH", "PACK"), "1")
    variables |= dict.fromkeys(("LIBFABRIC", "ROCM_PATH"), "/nowhere")
    done = subprocess.run(
        ["/bin/bash", str(script)], cwd=folder, env=variables, capture_output=True
    )
    assert b"syntax error" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    "spot",
    [*SPOTS, *(("--", flag) for flag in FLAGS), *(("path", name) for name in PATHS)],
    ids=".".join,
)
def test_a_text_is_refused_or_stays_a_text(spot: tuple[str, ...], tmp_path: Path) -> None:
    rendered: dict[str, None] = {}
    for text in PAYLOADS:
        with contextlib.suppress(ConfigError, ClusterError):
            rendered |= dict.fromkeys(scripts(spot, text))
    run("\n".join(f"(\n{text}\n)" for text in rendered), tmp_path)
    assert not list(tmp_path.rglob("pwned"))


def test_the_scripts_above_are_run_to_their_end(tmp_path: Path) -> None:
    """Or the test would prove nothing."""
    for number, script in enumerate(scripts(("description",), "a cluster")):
        if "session++" in script:  # it exits with the code of its last command
            continue
        folder = tmp_path / str(number)
        run(f"(\n{script}\n touch pwned\n)", folder)
        assert (folder / "pwned").exists(), script


def test_every_string_of_a_site_is_tried() -> None:
    from overland.cluster.site import Site

    found: set[tuple[str, ...]] = set()

    def walk(schema: dict[str, Any], path: tuple[str, ...]) -> None:
        for key, one in schema.get("properties", {}).items():
            text = str(one)
            if "$ref" in text and "array" not in text and "additional" not in text:
                walk(definitions[one.get("$ref", "").rpartition("/")[2]], (*path, key))
            elif "'type': 'string'" in text and "enum" not in text:
                found.add((*path, key))

    schema = Site.model_json_schema()
    definitions = schema["$defs"]
    walk(schema, ())
    assert found - COMMANDS <= set(SPOTS), found - COMMANDS - set(SPOTS)


def test_a_run_folder_with_a_line_break_is_refused_by_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["submit", "quickstart", "--site", "generic-nvidia", "--devices-per-node", "1"]
    words += ["--time", "01:00:00", "--dry-run", "job.dump_folder=runs\ntouch pwned"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    assert "cannot be used in a script" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
