"""Slurm's commands, and its compact lists: `n[1-3,7],login1` for hosts, `3,1(x2)` for numbers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence

from overland.errors import ClusterError

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


def job_state(env: Mapping[str, str]) -> str:
    """Returns Slurm's state of this job: RUNNING, CANCELLED, TIMEOUT, …; empty if unknown."""
    shown = ask("scontrol", "show", "job", env.get("SLURM_JOB_ID", ""), "--oneliner")
    state = re.search(r" JobState=(\w+)", shown)
    return state[1] if state else ""


def job_end(env: Mapping[str, str]) -> int | None:
    """Returns when this job reaches its time limit, if Slurm says so."""
    end = env.get("SLURM_JOB_END_TIME", "")
    return int(end) if end.isdecimal() else None


def why_asked_to_end(env: Mapping[str, str], name: str) -> str:
    """Returns why this job must end, once a process of it has received the signal of this name."""
    state = job_state(env)
    if state == "COMPLETING":  # this state hides the reason
        end = job_end(env)
        state = "TIMEOUT" if end is not None and time.time() >= end - 1 else "CANCELLED"
    otherwise = f" while Slurm reports the job as {state}" if state else ""
    return ENDED_BY.get(state, f"received {name}{otherwise}")


def was_requeued(env: Mapping[str, str]) -> bool:
    """Returns whether the job was requeued and this process is left over from before: for example
    on a node that Slurm could not reach and removed from the job."""
    shown = ask("scontrol", "show", "job", env.get("SLURM_JOB_ID", ""), "--oneliner")
    restarts = re.search(r" Restarts=(\d+) ", shown)
    return restarts is not None and int(restarts[1]) > int(env.get("SLURM_RESTART_COUNT") or 0)


def signal_step(step: str, number: int, env: Mapping[str, str] = os.environ) -> None:
    """Sends a signal to all tasks of a step, without waiting: scancel may take long if a node is
    gone."""
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
    """Returns the output of a Slurm command; empty if it is missing, fails or hangs. It ignores
    SIGTERM, which all processes of a job get when it is requeued."""
    deaf = ["sh", "-c", 'trap "" TERM; exec "$@"', "sh", *command]
    try:
        done = subprocess.run(deaf, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def squeue(*options: str, form: str, timeout: float) -> list[str] | None:
    """Returns a line for each job; none for a job that ended a while ago, which Slurm no longer
    knows; None if Slurm cannot be reached."""
    if shutil.which("squeue") is None:
        return None
    command = ["squeue", "--noheader", *options, f"--format={form}"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if asked.returncode:
        return [] if "Invalid job id" in asked.stderr else None
    return [line.strip() for line in asked.stdout.splitlines()]


def expand_hosts(text: str) -> list[str]:
    """Returns the hosts of a list such as `frontier[00001-00003,00007],login1`, in order."""
    words = re.findall(r"(?:[^,\[\]]+|\[[^\[\]]*\])+", text.strip())
    if not words or ",".join(words) != text.strip():
        raise ClusterError(f'"{text}": expected a list of hosts, such as n[1-3,7],login1')
    return [host for word in words for host in _expand(word)]


def expand_counts(text: str) -> list[int]:
    """Returns the numbers of a list such as `3,1(x2)`: 3, 1, 1."""
    counts: list[int] = []
    for word in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if match is None:
            raise ClusterError(f'"{text}": expected a list of numbers, such as 3,1(x2)')
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand(word: str) -> list[str]:
    """Expands one name, which may have several brackets: racks and nodes, `r[1-2]n[01-16]`."""
    before, bracket, rest = word.partition("[")
    if not bracket:
        return [word]
    inside, _, after = rest.partition("]")
    ends = _expand(after) if after else [""]
    return [f"{before}{middle}{end}" for middle in _numbers(inside) for end in ends]


def _numbers(inside: str) -> list[str]:
    """Expands `001-003,7` to 001, 002, 003, 7."""
    found: list[str] = []
    for part in inside.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ClusterError(f'"[{inside}]": expected numbers and ranges, such as [1-3,7]')
        found += [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)]
    return found
