"""Slurm, by its own commands, and its short form of lists: `n[1-3,7],login1` for hosts, `3,1(x2)`
for numbers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence

from overland.errors import ClusterError

MOST_RESTARTS = 10  # preemptions count too


def allocated_nodes(env: Mapping[str, str]) -> list[str]:
    if "SLURM_JOB_NODELIST" not in env:
        raise ClusterError(
            "this is for the batch script of a Slurm job; `overland submit` writes it"
        )
    return expand_hosts(env["SLURM_JOB_NODELIST"])


def shun(bad: Sequence[str], ours: Collection[str], env: Mapping[str, str]) -> None:
    """Asks Slurm to keep these nodes, the worst first, from the jobs of this name that wait, this
    one too if it was requeued. What it was asked for before (`ours`) and is not among them any more
    is forgotten; what the user excludes stays."""
    # A job that was just requeued is shown as completing; one that has ended refuses the change.
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
        # Half of what is left over stays usable, or the job might wait for ever.
        most = max(0, len(usable) - int(num_nodes)) // 2
        wanted = [*users, *[node for node in bad if node in usable][:most]]
        if set(wanted) != set(before):
            ask("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(wanted)}")


def usable_nodes(env: Mapping[str, str], feature: str = "") -> list[str]:
    """Of this job's partition, those that Slurm would give to a job. Only a single feature is
    looked at, and not an expression of several."""
    partition = env.get("SLURM_JOB_PARTITION", "")
    words = ["--noheader", "--Node", "--responding", f"--partition={partition}"]
    found = []
    for line in ask("sinfo", *words, "--format=%N|%t|%f").split():
        node, state, features = (*line.split("|", 2), "", "")[:3]
        is_fit = not re.fullmatch(r"[\w.-]+", feature) or feature in features.split(",")
        if state.startswith(("idle", "mix", "alloc", "comp", "plnd", "resv")) and is_fit:
            found.append(node)
    return list(dict.fromkeys(found))


def requeue(env: Mapping[str, str]) -> None:
    """This job, to get other nodes."""
    if may_requeue(env) and not was_requeued(env):
        ask("scontrol", "requeue", env.get("SLURM_JOB_ID", ""))


def may_requeue(env: Mapping[str, str]) -> bool:
    """A few times, or it would go on for ever."""
    return int(env.get("SLURM_RESTART_COUNT") or 0) < MOST_RESTARTS


def job_state(env: Mapping[str, str]) -> str:
    """What Slurm calls this job now: RUNNING, CANCELLED, TIMEOUT, …; empty if it does not say."""
    shown = ask("scontrol", "show", "job", env.get("SLURM_JOB_ID", ""), "--oneliner")
    state = re.search(r" JobState=(\w+)", shown)
    return state[1] if state else ""


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
    """What a command of Slurm prints; nothing, where it is missing, fails or hangs. When a job is
    requeued all of its processes get SIGTERM: that must not end what it still has to ask for."""
    deaf = ["sh", "-c", 'trap "" TERM; exec "$@"', "sh", *command]
    try:
        done = subprocess.run(deaf, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def squeue(*options: str, form: str, timeout: float) -> list[str] | None:
    """A line for each job; none for a job that ended a while ago, which Slurm does not know any
    more; None if Slurm cannot be asked."""
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
    """The hosts of a list such as `frontier[00001-00003,00007],login1`, in its order."""
    words = re.findall(r"(?:[^,\[\]]+|\[[^\[\]]*\])+", text.strip())
    if not words or ",".join(words) != text.strip():
        raise ClusterError(f'"{text}": expected a list of hosts, such as n[1-3,7],login1')
    return [host for word in words for host in _expand(word)]


def expand_counts(text: str) -> list[int]:
    """The numbers of a list such as `3,1(x2)`: 3, 1, 1."""
    counts: list[int] = []
    for word in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if match is None:
            raise ClusterError(f'"{text}": expected a list of numbers, such as 3,1(x2)')
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand(word: str) -> list[str]:
    """One name, which may hold several brackets: racks and nodes, `r[1-2]n[01-16]`."""
    before, bracket, rest = word.partition("[")
    if not bracket:
        return [word]
    inside, _, after = rest.partition("]")
    ends = _expand(after) if after else [""]
    return [f"{before}{middle}{end}" for middle in _numbers(inside) for end in ends]


def _numbers(inside: str) -> list[str]:
    """`001-003,7` as written out: 001, 002, 003, 7."""
    found: list[str] = []
    for part in inside.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ClusterError(f'"[{inside}]": expected numbers and ranges, such as [1-3,7]')
        found += [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)]
    return found
