"""The place of a task that srun started, with any `--mpi`.

A batch script and the shell of `salloc` have most of these variables too, filled with what the
*allocation* could run: SLURM_PROCID is 0 and SLURM_NTASKS is 8 where one process is. They are told
from a task by the step: it has no number there, or one that Slurm keeps for shells.
"""

from __future__ import annotations

from collections.abc import Mapping

from overland.errors import ClusterError
from overland.slurm import expand_counts, expand_hosts
from overland.world.rendezvous import LOOPBACK, Meeting, port_of_job
from overland.world.variables import first_set, number
from overland.world.world import World

FIRST_SPECIAL_STEP = 0xFFFFFFF0  # slurm.h counts batch, interactive and extern steps from the top


def from_srun(env: Mapping[str, str]) -> World | None:
    """A step of one task is no world: `srun --pty bash` is one, and whoever has its devices wants
    all of them, so ranks are started from there."""
    step_name = first_set(env, "SLURM_STEP_ID", "SLURM_STEPID")
    if step_name is None or "SLURM_PROCID" not in env:
        return None
    step = number(env, step_name)
    size_name = first_set(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") or ""
    size = number(env, size_name, at_least=1)
    if step >= FIRST_SPECIAL_STEP or size == 1 or size != number(env, "SLURM_NTASKS", size):
        return None
    here = env.get("SLURM_GTIDS", "").split(",") if env.get("SLURM_GTIDS") else None
    counts = _tasks_per_node(env, size)
    node = number(env, "SLURM_NODEID", 0)
    if node >= len(counts) or (here is not None and len(here) != counts[node]):
        return None  # a batch script that a task submitted: the step is its parent's
    _check(env, counts, here)
    job = number(env, "SLURM_JOB_ID" if "SLURM_JOB_ID" in env else "SLURM_JOBID")
    return World(
        rank=number(env, "SLURM_PROCID"),
        size=size,
        local_rank=number(env, "SLURM_LOCALID"),
        local_size=counts[node],
        meeting=Meeting.at(
            env,
            address=LOOPBACK if len(counts) == 1 else _first_host(env),
            port=port_of_job(job, step),
            name=f"slurm-{job}.{step}",
        ),
    )


def _tasks_per_node(env: Mapping[str, str], size: int) -> list[int]:
    name = first_set(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if name is None:
        raise ClusterError(
            "environment SLURM_STEP_TASKS_PER_NODE: not set in a step of "
            f"{size} tasks; start it with srun"
        )
    return expand_counts(env[name])


def _first_host(env: Mapping[str, str]) -> str:
    name = first_set(env, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    if name is None:
        raise ClusterError(
            "environment SLURM_STEP_NODELIST: not set; set MASTER_ADDR to the host of rank 0"
        )
    return expand_hosts(env[name])[0]


def _check(env: Mapping[str, str], counts: list[int], here: list[str] | None) -> None:
    """What every task of the step sees alike, so that all end with this sentence and none waits."""
    if len(set(counts)) > 1:
        raise ClusterError(
            f"environment SLURM_STEP_TASKS_PER_NODE: {','.join(map(str, counts))}: every node "
            "needs as many ranks as the others; start srun with --ntasks-per-node"
        )
    if here is not None and [int(i) - int(here[0]) for i in here] != list(range(len(here))):
        raise ClusterError(
            f"environment SLURM_GTIDS: ranks {','.join(here)} share a node: ranks must fill one "
            "node after the other; start srun with --distribution=block"
        )
