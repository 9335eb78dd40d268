"""What is asked of Slurm, by its own commands."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterable, Mapping

from overland.cluster.errors import ClusterError
from overland.cluster.hosts import expand_hosts

MOST_RESTARTS = 10  # preemptions count too


def allocated_nodes(env: Mapping[str, str]) -> list[str]:
    if "SLURM_JOB_NODELIST" not in env:
        raise ClusterError(
            "this is for the batch script of a Slurm job; `overland submit` writes it"
        )
    return expand_hosts(env["SLURM_JOB_NODELIST"])


def shun(nodes: Iterable[str], env: Mapping[str, str]) -> None:
    """Asks Slurm to keep these from the jobs of this name that still wait."""
    name = env.get("SLURM_JOB_NAME", "")
    listed = ["--noheader", "--states=PENDING", f"--name={name}", "--format=%i|%x"]
    for line in ask("squeue", "--me", *listed).split():
        job, _, excluded = line.partition("|")
        before = expand_hosts(excluded) if excluded and excluded != "(null)" else []
        together = ",".join(dict.fromkeys([*before, *nodes]))
        ask("scontrol", "update", f"JobId={job}", f"ExcNodeList={together}")


def requeue(env: Mapping[str, str]) -> None:
    """This job, to get other nodes: a few times, or it would go on for ever."""
    if int(env.get("SLURM_RESTART_COUNT") or 0) < MOST_RESTARTS and not was_requeued(env):
        ask("scontrol", "requeue", env.get("SLURM_JOB_ID", ""))


def was_requeued(env: Mapping[str, str]) -> bool:
    """Whether the job went back into the queue, and this process is left over from before: on a
    node that Slurm could not reach, say, and took from the job."""
    shown = ask("scontrol", "show", "job", env.get("SLURM_JOB_ID", ""), "--oneliner")
    restarts = re.search(r" Restarts=(\d+) ", shown)
    return restarts is not None and int(restarts[1]) > int(env.get("SLURM_RESTART_COUNT") or 0)


def signal_step(step: str, number: int, env: Mapping[str, str] = os.environ) -> None:
    """To all tasks of a step. scancel may wait long for a node that is gone, so that nobody waits
    for scancel."""
    command = ["scancel", f"--signal={number}", step]
    with contextlib.suppress(OSError):
        subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def ask(*command: str) -> str:
    """What a command of Slurm prints; nothing, where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
