"""How long a job may last, by its partition and number of nodes."""

from __future__ import annotations

import re

from overland.errors import ClusterError
from overland.tools.jobs.site import Limit, NamedSite


def choose_walltime(
    site: NamedSite, num_nodes: int, wanted: str | None, partition: str | None
) -> str:
    """`wanted` if the site allows it; without one, all that it allows."""
    slurm = site.facts.slurm
    special = slurm.partitions.get(partition or "")
    limits = special.limits if special and special.limits else slurm.limits
    place = f"{site.name}, partition {partition}," if special else site.name
    if wanted is not None:
        parse_walltime(wanted)
    if not limits:
        if wanted is None:
            raise ClusterError(
                f"{site.name}: how long a job may last is not known here; give --time HH:MM:SS"
            )
        return wanted
    limit = limit_for(limits, num_nodes)
    if limit is None:
        most = max(limit.nodes or 0 for limit in limits)
        raise ClusterError(f"--nodes: {place} takes {most} nodes at most, and this is {num_nodes}")
    if wanted is None:
        return limit.time
    if parse_walltime(wanted) > parse_walltime(limit.time):
        raise ClusterError(
            f"--time {wanted}: {place} allows {limit.time} for {num_nodes} nodes"
            f"{_other_ways(site, num_nodes, wanted, partition)}; --sessions chains jobs"
        )
    return wanted


def limit_for(limits: list[Limit], num_nodes: int) -> Limit | None:
    fitting = (limit for limit in limits if limit.nodes is None or num_nodes <= limit.nodes)
    return next(fitting, None)


def parse_walltime(text: str) -> int:
    """Seconds."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d{1,3}):([0-5]\d):([0-5]\d)", text)
    if found is None:
        raise ClusterError(f"--time {text}: expected HH:MM:SS or D-HH:MM:SS")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _other_ways(site: NamedSite, num_nodes: int, wanted: str, partition: str | None) -> str:
    for name, other in site.facts.slurm.partitions.items():
        limit = limit_for(other.limits, num_nodes)
        if name != partition and limit and parse_walltime(limit.time) >= parse_walltime(wanted):
            up_to = f" up to {limit.nodes} nodes" if limit.nodes else ""
            return f", and --partition {name} {limit.time}{up_to}"
    return ""
