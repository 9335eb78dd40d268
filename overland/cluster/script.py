"""Renders shell scripts: a job's, with its sbatch headers, srun flags and container, an
evaluation's, and the one-time setup; quotes every value and refuses secrets.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overland.cluster.job import BatchJob, sbatch_words
from overland.cluster.site import NamedSite, Site
from overland.cluster.slurm_jobs import MOST_RESTARTS
from overland.config.paths import SECRET
from overland.errors import ClusterError
from overland.plugins import need
from overland.words import control_character

GUARDS = 3  # at most; a job that loses its first node and all guards stays as an empty shell
DEFAULT_ROCM = "7.2"
SHORTEST_SECRET = 6  # a shorter value could occur in any text by coincidence


def render_job(job: BatchJob) -> str:
    """Returns the job script, which works with both bash and sbatch."""
    return _rendered(
        "job.sh.j2",
        job,
        most_restarts=MOST_RESTARTS,
        num_guards=min(GUARDS, job.wanted.nodes + job.wanted.spares - 1),
        supervisor=f"{python(job)} -P -m overland",
    )


def render_evaluation(job: BatchJob, words: Sequence[str]) -> str:
    """Returns the script of an evaluation job; `words` are the arguments of `overland eval`."""
    return _rendered("eval.sh.j2", job, words=words)


def _rendered(name: str, job: BatchJob, **more: object) -> str:
    """Returns a script; `command` is what each rank runs, up to the subcommand."""
    runs_python = f"{container_command(job)} python" if job.wanted.container else python(job)
    return str(
        template(name).render(
            command=f"{runs_python} -P -m overland",
            job=job,
            site=job.site,
            facts=job.site.facts,
            wanted=job.wanted,
            place=job.place,
            headers=headers(job),
            more_headers=sbatch_words(job.wanted.sbatch),
            srun=srun_flags(job),
            **more,
        )
    )


def render_setup(site: NamedSite) -> str:
    """Returns the commented script for the one-time setup on a cluster."""
    facts = site.facts
    return template("setup.sh.j2").render(
        site=site,
        facts=facts,
        setup=facts.setup,
        rocm=rocm_version(facts),
        source=_source(),
    )


def render_session(site: NamedSite) -> str:
    """Returns what a job script of one's own needs of a site: modules, network variables and
    caches. It installs nothing, and needs no network."""
    return template("session.sh.j2").render(site=site, facts=site.facts, place=None)


def rocm_version(facts: Site) -> str:
    """Returns the ROCm version that wheels are installed for: that of the module they are loaded
    with, since RCCL's network plugin is built for it."""
    found = [re.match(r"rocm/(\d+\.\d+)", module) for module in facts.modules]
    loaded = next((one[1] for one in found if one), None)
    return loaded or facts.setup.rocm or DEFAULT_ROCM


def packed_by_setup() -> Path | None:
    """Returns the packed environment that the setup script made of this Python, if it is newer than
    everything installed since."""
    session = session_file()
    archive = session and session.with_name("overland-env.tar.gz")
    if archive is None or not archive.is_file():
        return None
    installed = Path(sysconfig.get_path("purelib")).stat().st_mtime
    return archive if archive.stat().st_mtime >= installed else None


@functools.cache
def template(name: str) -> Any:
    jinja2 = need("jinja2", "a job script", "cluster", ClusterError)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # this is bash, not HTML; `sh` and `words` do the quoting
        finalize=_one_line,
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    environment.filters["words"] = lambda texts: " ".join(map(quoted_words, texts))
    return environment.get_template(name)


def _one_line(value: Any) -> Any:
    """Checks every value that a template inserts into a script. Quoting does not help in a comment
    or an #SBATCH line: whatever follows a line break there is a command."""
    if isinstance(value, str) and (letter := control_character(value)) is not None:
        raise ClusterError(
            f"{value!r:.200} cannot be used in a script because it contains {letter}: remove it "
            "from the config, the flags or the site file"
        )
    return value


def quoted_words(text: str) -> str:
    """Quotes one or more words from a site file, so that the shell takes them literally."""
    try:
        return shlex.join(shlex.split(text))
    except ValueError:
        raise ClusterError(f"{text!r}: a quote is not closed") from None


def headers(job: BatchJob) -> list[str]:
    """Returns the sbatch options that need no explanation in the script."""
    wanted, slurm = job.wanted, job.site.facts.slurm
    flags = {
        "account": wanted.account,
        "partition": wanted.partition,
        "qos": wanted.qos,
        "constraint": slurm.constraint and shlex.quote(slurm.constraint),
        "nodes": wanted.nodes + wanted.spares,
        "ntasks-per-node": job.devices_per_node,
        "cpus-per-task": job.cpus_per_task,
        "gpus-per-node": job.devices_per_node if slurm.gpus == "per-node" else None,
        "time": job.time,
        "output": shlex.quote(f"{str(job.place.logs).replace('%', '%%')}/job-%j.log"),
    }
    lines = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    lines += ["--exclusive", "--mem=0"] if slurm.exclusive else []
    return [*lines, *slurm.sbatch]


def srun_flags(job: BatchJob) -> list[str]:
    slurm = job.site.facts.slurm
    flags = [
        f"--ntasks-per-node={job.devices_per_node}",
        f"--cpus-per-task={job.cpus_per_task}" if job.cpus_per_task else '--cpus-per-task="$cpus"',
    ]
    if slurm.gpus == "per-task":
        flags.append("--gpus-per-task=1")
    if slurm.gpus == "per-node":
        flags.append(f"--gpus-per-node={job.devices_per_node}")
    flags += [f"--gpu-bind={shlex.quote(slurm.gpu_bind)}"] if slurm.gpu_bind else []
    return [*flags, *map(quoted_words, slurm.srun)]


def python(job: BatchJob) -> str:
    """Returns the Python on the node itself; a container brings its own."""
    packed = job.wanted.packed_env
    return '"$node_env/bin/python"' if packed else shlex.quote(job.place.python)


def container_command(job: BatchJob) -> str:
    settings, place = job.site.facts.container, job.place
    image = shlex.quote(str(job.wanted.container))
    if settings.command is not None:
        return settings.command.replace("{image}", image)
    devices = {"nvidia": "--nv ", "amd": "--rocm ", "none": ""}[job.site.facts.accelerator]
    folders = dict.fromkeys([*settings.binds, str(place.workdir), str(place.run)])
    inside = [
        folder
        for folder in folders
        if not any(other != folder and Path(folder).is_relative_to(other) for other in folders)
    ]
    binds = " ".join(f"--bind {shlex.quote(folder)}" for folder in inside)
    return f"apptainer exec {devices}{binds} {image}"


def refuse_secret_values(text: str, env: Mapping[str, str] = os.environ) -> None:
    """Raises an error if text about to be written or shown contains the value of a secret."""
    for name, value in env.items():
        if SECRET.search(name) and len(value) >= SHORTEST_SECRET and value in text:
            raise ClusterError(
                f"the script would contain the value of {name}; remove it from the config, the "
                "flags or the site file, and pass it with --env"
            )


def _source() -> str:
    """Returns what pip installs Overland from: this checkout, or the package name."""
    checkout = Path(__file__).resolve().parents[3]
    return str(checkout) if (checkout / "pyproject.toml").is_file() else "overland"


def session_file() -> Path | None:
    """Returns the file that the setup script wrote next to its environments, if this Python belongs
    to one of them."""
    file = Path(sys.prefix).parent.parent / "overland.sh"
    return file if Path(sys.prefix).parent.name == "envs" and file.is_file() else None
