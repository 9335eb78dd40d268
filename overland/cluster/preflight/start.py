"""Starts the processes of a preflight's tasks, with one srun or as children of this process,
notices those that fail, and always ends them.

When srun reports a failed task (`srun: error: n3: task 4: Exited with exit code 1`), that and the
last line that the task printed are noticed at once, so that nobody waits for the node.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from overland.cluster.slurm_jobs import signal_step
from overland.errors import ClusterError
from overland.processes import PYTHON, wait_for_all
from overland.slurm import expand_counts, expand_hosts
from overland.world.launch import free_port

TASK = ("preflight", "--task")
GRACE_SECONDS = 5.0
FAILED = re.compile(r"^srun: error: (\S+): tasks? ([\d,\-]+): (.+)$", re.MULTILINE)


class Started:
    """The started processes, and the file that they all write to."""

    def __init__(self, is_all: bool = True) -> None:
        self.is_all = is_all
        self.processes: list[subprocess.Popen[bytes]] = []
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.step: str | None = None
        """Slurm's id of the step, once a task has reported it."""

    def ended(self) -> dict[str, str]:
        """Returns nodes with a task that has ended, and the reason if known."""
        words = self._read()
        found: dict[str, str] = {}
        for nodes, tasks, what in FAILED.findall(words):
            first = re.match(r"\d+", tasks)
            said = _last_line_of(first[0], words) if first else ""
            reason = f"{what[0].lower()}{what[1:]}" + (f" ({said})" if said else "")
            found |= dict.fromkeys(expand_hosts(nodes), reason)
        return found

    def is_over(self) -> bool:
        """Whether all of them have ended."""
        return self.is_all and all(process.poll() is not None for process in self.processes)

    def last_words(self) -> str:
        lines = [line for line in self._read().splitlines() if line.strip()]
        return "\n".join(lines[-5:])

    def stop(self) -> None:
        """Ends all tasks. They end by themselves when the conductor says so, otherwise they are
        killed."""
        have_ended = wait_for_all(self.processes, GRACE_SECONDS)
        if not have_ended and self.is_all and self.step is not None:
            signal_step(self.step, signal.SIGKILL, self._env)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not wait_for_all(self.processes, GRACE_SECONDS):
                for process in self.processes:
                    process.send_signal(number)
                    process.send_signal(signal.SIGCONT)
        wait_for_all(self.processes, GRACE_SECONDS)
        self.output.close()

    def _read(self) -> str:
        return os.pread(self.output.fileno(), 2**22, 0).decode(errors="replace")

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._env = dict(env)
        try:
            process = subprocess.Popen(
                command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise ClusterError(f"cannot run {command[0]}: {error.strerror}") from None
        self.processes.append(process)


def with_launch(launch: Sequence[str], env: Mapping[str, str]) -> Started:
    """Starts tasks as training is started, except that a failing task must not end others."""
    words = list(launch)
    if Path(words[0]).name == "srun":
        words = [word for word in words if not word.startswith("--kill-on-bad-exit")]
        words[1:1] = ["--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--label"]
    started = Started()
    started.start([*words, *TASK], {**env, "SLURM_EXPORT_ENV": "ALL"})
    return started


def here(num_tasks: int, env: Mapping[str, str]) -> Started:
    """Starts tasks on this machine, with torchrun's variables."""
    started = Started()
    shared = {
        **env,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_tasks),
        "LOCAL_WORLD_SIZE": str(num_tasks),
    }
    for rank in range(num_tasks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.start([*PYTHON, "-m", "overland", *TASK], {**shared, **place})
    return started


def first_task(env: Mapping[str, str]) -> Started:
    """Starts the task for this process, which is busy conducting; the others are starting."""
    started = Started(is_all=False)
    started.start([*PYTHON, "-m", "overland", *TASK], env)
    return started


def nodes_of(env: Mapping[str, str], only: str | None = None) -> list[str]:
    """Returns the nodes of the allocation, or the selected ones; none outside of an allocation."""
    nodes = expand_hosts(env["SLURM_JOB_NODELIST"]) if env.get("SLURM_JOB_NODELIST") else []
    if only is None:
        return nodes
    chosen = expand_hosts(only)
    strangers = [node for node in chosen if node not in nodes]
    if strangers:
        raise ClusterError(f"--nodes {only}: not in this allocation: {', '.join(strangers)}")
    return chosen


def tasks_per_node(env: Mapping[str, str], ranks_per_device: int = 1) -> int:
    """Returns what the job requested; else one per GPU that Slurm allocated, or as many as share
    one; else what fits."""
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        found = re.search(r"[1-9]\d*$", env.get(name, ""))  # GPUs may have a type: h100:4
        if found:
            return int(found[0]) * (ranks_per_device if "GPUS" in name else 1)
    return min(expand_counts(env.get("SLURM_TASKS_PER_NODE", "1")))


def srun_words(tasks: int, env: Mapping[str, str]) -> list[str]:
    """Returns the launch command. srun reads the GPUs of the allocation from the environment."""
    cores = env.get("SLURM_CPUS_PER_TASK")
    shape = [f"--ntasks-per-node={tasks}", *([f"--cpus-per-task={cores}"] if cores else [])]
    return ["srun", *shape, "--mpi=none", *PYTHON, "-m", "overland"]


def _last_line_of(task: str, words: str) -> str:
    lines = re.findall(rf"^\s*{task}: (.+)$", words, flags=re.MULTILINE)
    return lines[-1].strip()[:300] if lines else ""
