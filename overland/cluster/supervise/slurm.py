"""What is asked of Slurm while a job runs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping

from overland.cluster.errors import ClusterError
from overland.cluster.hosts import expand_hosts


def allocated_nodes(env: Mapping[str, str]) -> list[str]:
    if "SLURM_JOB_NODELIST" not in env:
        raise ClusterError(
            "this is for the batch script of a Slurm job; `overland submit` writes it"
        )
    return expand_hosts(env["SLURM_JOB_NODELIST"])


def shun(nodes: Iterable[str], env: Mapping[str, str], requeue: bool) -> None:
    """Asks Slurm to keep bad nodes from the jobs of this name that still wait, and where that is
    allowed, to run this one again on others."""
    job, name = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_NAME", "")
    listed = ",".join(nodes)
    waiting = ask(
        "squeue", "--me", "--noheader", "--states=PENDING", f"--name={name}", "--format=%i"
    )
    for other in waiting.split():
        ask("scontrol", "update", f"JobId={other}", f"ExcNodeList={listed}")
    if requeue:
        ask("scontrol", "update", f"JobId={job}", f"ExcNodeList={listed}")
        ask("scontrol", "requeue", job)


def ask(*command: str) -> str:
    """What a command of Slurm prints; nothing, where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
