"""Slurm's commands, and its compact lists: `n[1-3,7],login1` for hosts, `3,1(x2)` for numbers."""

from __future__ import annotations

import re
import shutil
import subprocess

from overland.errors import ClusterError


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
