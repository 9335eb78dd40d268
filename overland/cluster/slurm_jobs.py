"""What a running job asks of Slurm: its nodes, state and time limit, to requeue it (a few times at
most), to exclude bad nodes from waiting jobs (but not so many that these cannot start), and srun on
chosen nodes.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence

from overland.errors import ClusterError
from overland.processes import start_unheard
from overland.slurm import ask, expand_hosts, squeue

ENDED_BY = {  # Slurm's states of a job
    "CANCELLED": "the job was cancelled (scancel, or preemption)",
    "TIMEOUT": "the job has reached its time limit",
    "PREEMPTED": "the job was preempted",
}
MOST_RESTARTS = 10  # preemptions count too


def allocated_nodes(env: Mapping[str, str]) -> list[str]:
    if "SLURM_JOB_NODELIST" not in env:
        raise ClusterError(
            "this works only in the batch script of a Slurm job, which `overland submit` writes"
        )
    return expand_hosts(env["SLURM_JOB_NODELIST"])


def shun(bad: Sequence[str], ours: Collection[str], env: Mapping[str, str]) -> None:
    """Asks Slurm to exclude these nodes, the worst first, from waiting jobs of this name, including
    this one if it was requeued. Earlier exclusions (`ours`) that are no longer listed are lifted;
    those of the user stay."""
    # A job that was just requeued is listed as completing; one that has ended rejects the change.
    states = "--states=PENDING,COMPLETING"
    listed = ["--noheader", states, f"--name={env.get('SLURM_JOB_NAME', '')}"]
    for line in ask("squeue", "--me", *listed, "--format=%i|%x|%D|%f").split():
        found = re.fullmatch(r"([^|]+)\|([^|]*)\|(\d+)\|(.*)", line)
        if found is None:
            continue
        job, excluded, num_nodes, feature = found.groups()
        before = expand_hosts(excluded) if excluded and excluded != "(null)" else []
        users = [node for node in before if node not in ours]
        usable = [node for node in usable_nodes(env, feature) if node not in users]
        # Half of the surplus nodes stay usable, or the job might wait forever.
        most = max(0, len(usable) - int(num_nodes)) // 2
        wanted = [*users, *[node for node in bad if node in usable][:most]]
        if set(wanted) != set(before):
            ask("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(wanted)}")


def usable_nodes(env: Mapping[str, str], feature: str = "") -> list[str]:
    """Returns the nodes of this job's partition that Slurm could give to a job. Only a single
    feature is considered, not an expression of several."""
    partition = env.get("SLURM_JOB_PARTITION", "")
    words = ["--noheader", "--Node", "--responding", f"--partition={partition}"]
    found = []
    for line in ask("sinfo", *words, "--format=%N|%t|%f").split():
        node, state, features = (*line.split("|", 2), "", "")[:3]
        is_fit = not re.fullmatch(r"[\w.-]+", feature) or feature in features.split(",")
        if state.startswith(("idle", "mix", "alloc", "comp", "plnd", "resv")) and is_fit:
            found.append(node)
    return list(dict.fromkeys(found))


def waiting_jobs(env: Mapping[str, str]) -> list[str] | None:
    """Returns the ids of the waiting jobs of this job's chain; None if Slurm cannot be reached."""
    chain = ("--me", f"--name={env.get('SLURM_JOB_NAME', '')}", "--states=PENDING")
    return squeue(*chain, form="%i", timeout=20.0)


def requeue(env: Mapping[str, str]) -> None:
    """Requeues this job, to get other nodes."""
    if may_requeue(env) and not was_requeued(env):
        ask("scontrol", "requeue", env.get("SLURM_JOB_ID", ""))


def may_requeue(env: Mapping[str, str]) -> bool:
    """Returns whether this job may be requeued again: only a few times, or it might never end."""
    return int(env.get("SLURM_RESTART_COUNT") or 0) < MOST_RESTARTS


def job_fact(env: Mapping[str, str], name: str) -> str:
    """Returns what Slurm says of this job under this name, in one word; empty if unknown."""
    shown = ask("scontrol", "show", "job", env.get("SLURM_JOB_ID", ""), "--oneliner")
    found = re.search(rf" {name}=(\w+)", shown)
    return found[1] if found else ""


def job_end(env: Mapping[str, str]) -> int | None:
    """Returns when this job reaches its time limit, if Slurm says so."""
    end = env.get("SLURM_JOB_END_TIME", "")
    return int(end) if end.isdecimal() else None


def why_asked_to_end(env: Mapping[str, str], name: str) -> str:
    """Returns why this job must end, once a process of it has received the signal of this name."""
    state = job_fact(env, "JobState")
    if state == "COMPLETING":  # this state hides the reason
        end = job_end(env)
        state = "TIMEOUT" if end is not None and time.time() >= end - 1 else "CANCELLED"
    otherwise = f" while Slurm reports the job as {state}" if state else ""
    return ENDED_BY.get(state, f"received {name}{otherwise}")


def was_requeued(env: Mapping[str, str]) -> bool:
    """Returns whether the job was requeued and this process is left over from before: for example
    on a node that Slurm could not reach and removed from the job."""
    return int(job_fact(env, "Restarts") or 0) > int(env.get("SLURM_RESTART_COUNT") or 0)


def srun_on(launch: Sequence[str], nodes: Sequence[str], tasks_per_node: int) -> list[str]:
    """Returns a launch command for these nodes. `--overlap`: a job step with a lost node keeps its
    cores on all other nodes, and srun would wait for them forever; so does the shell of `srun --pty
    bash`, which is a step too."""
    program, *rest = launch
    return [
        program,
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes) * tasks_per_node}",
        f"--nodelist={','.join(nodes)}",
        "--overlap",
        *rest,
    ]


def signal_step(step: str, number: int, env: Mapping[str, str] = os.environ) -> None:
    """Sends a signal to all tasks of a step, without waiting: scancel may take long if a node is
    gone."""
    with contextlib.suppress(OSError):
        start_unheard(["scancel", f"--signal={number}", step], env)
