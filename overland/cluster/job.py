"""Plans a job: decides its walltime, devices per node, name, and when Slurm signals its end, from
what the user requested and what the site allows.
"""

from __future__ import annotations

import hashlib
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from overland.errors import ClusterError
from overland.world.devices import num_local_ranks

if TYPE_CHECKING:
    from overland.cluster.site import Limit, NamedSite

LEAST_SIGNAL_SECONDS = 60  # Slurm's clock for signals ticks once a minute
MOST_SIGNAL_SECONDS = 65535
# sbatch flags that the rest of the script depends on, so they must be given as our own options.
OURS = {
    **dict.fromkeys(("--nodes", "-N"), "use --nodes and --spares"),
    **dict.fromkeys(("--ntasks", "-n", "--ntasks-per-node"), "use --devices-per-node"),
    **dict.fromkeys(("--job-name", "-J"), "use --name"),
    **dict.fromkeys(("--time", "-t"), "use --time"),
}
NO_LIMIT = "{site}: the walltime limit is not known; give --time HH:MM:SS"


@dataclass(frozen=True)
class JobRequest:
    """What the user requested, by the options of `overland submit`; None means the site's default.

    Args:
        nodes: Nodes to train on.
        spares: Spare nodes, held in reserve.
        sessions: Number of jobs in the chain.
        time: Time limit per job, as for sbatch; default: the site's maximum.
        name: Job name; default: from the run folder.
        devices_per_node: Devices per node, if the site does not specify it.
        container: Container image to run in, such as overland.sif.
        packed_env: A conda-pack .tar.gz to unpack on each node's disk; default: that of setup.sh,
            if there is one; none: import from where Python is.
        env: Environment variable to pass on; its value is never printed.
        sbatch: Extra sbatch flags, such as "--mail-type=END".
        preflight: Test all nodes before training on them.
        here: Run inside the current Slurm job instead of submitting one.
    """

    nodes: int = 1
    spares: int = 0
    sessions: int = 1
    time: str | None = None
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    name: str | None = None
    devices_per_node: int | None = None
    container: str | None = None
    packed_env: str | None = None
    env: Sequence[str] = ()
    sbatch: str = ""
    preflight: bool = True
    here: bool = False


LEAST = {"nodes": 1, "spares": 0, "sessions": 1, "devices_per_node": 1}


@dataclass(frozen=True)
class RunPlace:
    """The paths of a run, and how many steps it trains for."""

    run: Path
    workdir: Path
    config: Path
    done: Path
    stopped: Path
    logs: Path
    python: str
    steps: int
    margin_minutes: float
    repeatable: bool = True
    """Whether the same job, if it runs again, resumes from the newest checkpoint."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables used in the config's paths, with their values at submission."""
    setup: Path | None = None
    """The file that `overland env` wrote for sessions to source, if Python comes from there."""
    evaluates: bool = False
    """Whether the job evaluates the checkpoint at `config`, instead of training."""


@dataclass(frozen=True)
class BatchJob:
    """Everything that goes into the job script."""

    site: NamedSite
    wanted: JobRequest
    place: RunPlace
    name: str
    devices_per_node: int
    cpus_per_task: int | None
    time: str | None
    chained: bool

    @property
    def num_ranks(self) -> int:
        return self.wanted.nodes * self.devices_per_node

    @property
    def signal_seconds(self) -> int:
        wanted = math.ceil(self.place.margin_minutes * 60)
        return min(max(wanted, LEAST_SIGNAL_SECONDS), MOST_SIGNAL_SECONDS)

    def to_json(self) -> dict[str, object]:
        run = {"run": str(self.place.run), "config": str(self.place.config)}
        return {
            "site": self.site.name,
            "name": self.name,
            "nodes": self.wanted.nodes,
            **({} if self.place.evaluates else {"spares": self.wanted.spares}),
            "devices_per_node": self.devices_per_node,
            "ranks": self.num_ranks,
            "sessions": self.wanted.sessions,
            "time": self.time,
            **({"checkpoint": run["config"]} if self.place.evaluates else run),
            "logs": str(self.place.logs),
        }


def num_devices_per_node(site: NamedSite, wanted: JobRequest) -> int:
    """Returns the devices per node. Needed before the config is read, because the config must fit
    them."""
    if missing := list(missing_options(site, wanted)):
        raise ClusterError("\n".join(missing))
    known = wanted.devices_per_node or site.facts.slurm.within(wanted.partition).devices_per_node
    return known or num_local_ranks()  # if none is known, the job runs on this machine


def missing_options(site: NamedSite, wanted: JobRequest) -> Iterator[str]:
    """Yields a sentence for each option that must be given at this site and is not."""
    slurm, there = site.facts.slurm, site.facts.slurm.within(wanted.partition)
    if site.facts.scheduler == "none":
        return
    names = ", ".join(sorted(slurm.partitions))
    needs = [] if wanted.here else [need for need in slurm.needs if getattr(wanted, need) is None]
    for need in needs:
        choices = f" ({names})" if need == "partition" and names else ""
        yield (
            f"{site.name} requires --{need}{choices} for every job: give it, or set "
            f"SBATCH_{need.upper()}"
        )
    if not (wanted.devices_per_node or there.devices_per_node or "partition" in needs):
        what = f"{site.name}: the number of devices per node"
        if names:
            options = f"--partition ({names}) or --devices-per-node"
            yield f"{what} depends on the partition; give {options}"
        else:
            yield f"{what} is not known; give --devices-per-node"
    if not (wanted.here or wanted.time or there.limits):
        yield NO_LIMIT.format(site=site.name)


def plan_job(site: NamedSite, wanted: JobRequest, place: RunPlace) -> BatchJob:
    """Returns the planned job, or raises an error that says what does not fit."""
    _check_words(wanted)
    devices = num_devices_per_node(site, wanted)
    if site.facts.scheduler == "none":
        if wanted.nodes + wanted.spares > 1:
            raise ClusterError(f"--nodes: {site.name} is a single machine without a scheduler")
        chain, time, cpus = False, None, None
    else:
        limited = (site, wanted.nodes + wanted.spares, wanted.time, wanted.partition)
        time = None if wanted.here else choose_walltime(*limited)
        cpus = site.facts.slurm.within(wanted.partition).cpus_per_task
        chain = not wanted.here and _may_chain(site, wanted)
        if time is not None and parse_walltime(time) <= place.margin_minutes * 60:
            raise ClusterError(
                f"--time {time}: ranks stop {place.margin_minutes:g} minutes before the end "
                "(checkpoint.walltime_margin_minutes), which leaves no time to train; raise "
                "--time, or lower that key"
            )
    if wanted.packed_env and not site.facts.disk.node_local:
        raise ClusterError(
            f"--packed-env: the site file of {site.name} names no node-local disk (disk.node_local)"
        )
    if wanted.packed_env and wanted.container:
        raise ClusterError("--packed-env and --container both provide Python; give only one")
    name = wanted.name or job_name(place.run)
    return BatchJob(site, wanted, place, name, devices, cpus, time, chain)


def job_name(run: Path) -> str:
    """Returns a name derived from the run folder's path, so that only jobs of the same run wait for
    each other."""
    mark = hashlib.sha256(str(run).encode()).hexdigest()[:6]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', run.name)}-{mark}"


def sbatch_words(text: str) -> list[str]:
    """Splits text such as `--mail-user=me -x node1` into flags, each with its value."""
    flags: list[str] = []
    try:
        words = shlex.split(text)
    except ValueError:
        raise ClusterError(f"--sbatch {text}: a quote is not closed") from None
    for word in words:
        if word.startswith("-"):
            flag, equals, value = word.partition("=")
            flags.append(f"{flag}={shlex.quote(value)}" if equals else word)
        elif flags:
            flags[-1] += f" {shlex.quote(word)}"
        else:
            raise ClusterError(f"--sbatch {text}: expected flags, such as --mail-type=END")
    return flags


def _may_chain(site: NamedSite, wanted: JobRequest) -> bool:
    for place in (wanted.partition, wanted.qos):
        if place in site.facts.slurm.no_chain_in:
            if wanted.sessions > 1:
                raise ClusterError(f"--sessions: {site.name} does not allow job chains in {place}")
            return False
    return True


def _check_words(wanted: JobRequest) -> None:
    for flag in ("account", "partition", "qos", "name"):
        value = getattr(wanted, flag)
        letters = r"[\w.:@+-]+" if flag == "name" else r"[\w.:@+,-]+"
        if value is not None and not re.fullmatch(letters, value):
            raise ClusterError(f"--{flag} {value!r}: expected a single word")
    for name in wanted.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            shown = f"{name.partition('=')[0]}=…"  # the rest may be the secret itself
            raise ClusterError(
                f"--env {shown}: expected only the name of a variable; its value is taken from the "
                "environment and never written to disk"
            )
    if re.search(r"--export[= ]\S*=", wanted.sbatch):
        raise ClusterError(
            "--sbatch: a value in --export would be readable in the script; use `--env NAME` to "
            "pass a variable by name"
        )
    for word in sbatch_words(wanted.sbatch):
        flag = re.split(r"[= ]", word)[0] if word.startswith("--") else word[:2]
        if flag in OURS:
            raise ClusterError(
                f"--sbatch {word}: the rest of the script depends on this value; {OURS[flag]}"
            )


def choose_walltime(
    site: NamedSite, num_nodes: int, wanted: str | None, partition: str | None
) -> str:
    """Returns `wanted` as HH:MM:SS, if the site allows it; without one, the most that the site
    allows."""
    limits = site.facts.slurm.within(partition).limits
    is_special = partition in site.facts.slurm.partitions
    place = f"{site.name}, partition {partition}," if is_special else site.name
    if wanted is not None:
        wanted = walltime_in_words(parse_walltime(wanted))
    if not limits:
        if wanted is None:
            raise ClusterError(NO_LIMIT.format(site=site.name))
        return wanted
    limit = limit_for(limits, num_nodes)
    if limit is None:
        most = max(limit.nodes or 0 for limit in limits)
        raise ClusterError(f"--nodes: {place} allows at most {most} nodes, not {num_nodes}")
    if wanted is None:
        return limit.time
    if parse_walltime(wanted) > parse_walltime(limit.time):
        raise ClusterError(
            f"--time {wanted}: {place} allows {limit.time} for {num_nodes} nodes"
            f"{_other_ways(site, num_nodes, wanted, partition)}; use --sessions for a chain of jobs"
        )
    return wanted


def limit_for(limits: list[Limit], num_nodes: int) -> Limit | None:
    fitting = (limit for limit in limits if limit.nodes is None or num_nodes <= limit.nodes)
    return next(fitting, None)


def parse_walltime(text: str) -> int:
    """Returns a walltime in seconds; takes all forms that sbatch takes."""
    found = re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,5})(?::([0-5]?\d))?(?::([0-5]?\d))?", text)
    if found is None:
        raise ClusterError(
            f"--time {text}: expected minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
        )
    days, numbers = found[1], [int(part) for part in found.groups()[1:] if part is not None]
    if days is None and len(numbers) < 3:
        numbers = [0, *numbers]  # without days, one or two numbers begin with minutes
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def walltime_in_words(seconds: int) -> str:
    """Returns a walltime as scripts write it, HH:MM:SS."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _other_ways(site: NamedSite, num_nodes: int, wanted: str, partition: str | None) -> str:
    for name, other in site.facts.slurm.partitions.items():
        limit = limit_for(other.limits, num_nodes)
        if name != partition and limit and parse_walltime(limit.time) >= parse_walltime(wanted):
            up_to = f" up to {limit.nodes} nodes" if limit.nodes else ""
            return f", and --partition {name} allows {limit.time}{up_to}"
    return ""
