"""The tasks of an allocation that this process is in, but is no task of: srun's words for them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

from overland.errors import ClusterError
from overland.slurm import expand_counts, expand_hosts


def nodes_of(env: Mapping[str, str], only: str | None = None) -> list[str]:
    """The nodes of the allocation, or those of them that were chosen; none outside of one."""
    nodes = expand_hosts(env["SLURM_JOB_NODELIST"]) if env.get("SLURM_JOB_NODELIST") else []
    if only is None:
        return nodes
    chosen = expand_hosts(only)
    strangers = [node for node in chosen if node not in nodes]
    if strangers:
        raise ClusterError(f"--nodes {only}: {', '.join(strangers)}: no node of this allocation")
    return chosen


def tasks_per_node(env: Mapping[str, str]) -> int:
    """As the job asked for; else one per GPU that Slurm gives; else what fits on every node."""
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        found = re.search(r"[1-9]\d*$", env.get(name, ""))  # GPUs may have a type: h100:4
        if found:
            return int(found[0])
    return min(expand_counts(env.get("SLURM_TASKS_PER_NODE", "1")))


def srun_words(nodes: Sequence[str], tasks: int, env: Mapping[str, str]) -> list[str]:
    """`--overlap`: the shell of `srun --pty bash` is a step too, and holds what it was given. GPUs
    are as the allocation has them: srun reads that from the environment."""
    cores = env.get("SLURM_CPUS_PER_TASK")
    return [
        "srun",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes) * tasks}",
        f"--ntasks-per-node={tasks}",
        f"--nodelist={','.join(nodes)}",
        *([f"--cpus-per-task={cores}"] if cores else []),
        "--mpi=none",
        "--overlap",
        sys.executable,
        "-m",
        "overland",
    ]
