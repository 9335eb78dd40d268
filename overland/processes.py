"""Processes: starting our own, identifying this one, checking whether another still runs, and the
limit of open files."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

# The start of the commands that run Overland again. `-P` keeps the current folder off the path: a
# user's file there, such as random.py, would be imported in place of Python's own module.
# `job.custom_import` adds the folder itself.
PYTHON = (sys.executable, "-P")
# Terminals and Slurm signal all processes of a job. Helpers leave it to their parent to react, and
# end when it does.
PARENTS_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
)  # fmt: skip


def this_process() -> dict[str, Any]:
    process = os.getpid()
    return {"host": host(), "process": process, "start": _start_of(process)}


def host() -> str:
    """Returns a name for the PID namespace: containers on one machine have their own numbers."""
    try:
        space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        space = ""
    return f"{socket.gethostname()}-{space}"


def is_running(owner: dict[str, Any]) -> bool:
    process = owner.get("process")
    if not isinstance(process, int):
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _start_of(process) == owner.get("start")


def facts_of(process: int) -> list[str]:
    """Returns what Linux says about a process, from its state on; empty if it has ended, even if
    its parent has not noticed yet, or on another system."""
    try:
        facts = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if not facts or facts[0] in "ZX" else facts


def _start_of(process: int) -> str | None:
    """Returns the start time, which distinguishes it from a later process with the same number; ""
    if it has ended; None if the system does not say."""
    if not Path("/proc/self/stat").exists():
        return None
    facts = facts_of(process)
    return facts[19] if facts else ""


def age_of_process() -> float:
    """Returns the seconds since this process started; 0 if the system does not say."""
    try:
        begun = int(_start_of(os.getpid()) or "") / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - begun)
    except (AttributeError, OSError, ValueError):
        return 0.0


def start_unheard(command: Sequence[str], env: Mapping[str, str]) -> Popen[bytes]:
    """Starts a process that reads nothing, and whose output nobody reads."""
    return Popen(command, env=dict(env), stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)


def wait_for_all(processes: Sequence[Popen[bytes]], seconds: float) -> bool:
    """Waits this long for our own processes to end, and returns whether they have."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


STOPPED_STATES = ("T", "t")  # by a signal, by a debugger


def state_of(pid: int) -> str:
    """Returns the kernel's state, R, S, D, T, …; empty if the process no longer exists."""
    return "".join(facts_of(pid)[:1])


def allow_open_files() -> None:
    """Raises the limit of open files to the user's maximum: shells often start with 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
