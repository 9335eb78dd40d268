"""A run on the virtual nodes, as a user submits it, and faults as clusters have them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from overland.checkpoint.folder import latest_checkpoint
from overland.checkpoint.read import open_checkpoint
from overland.cluster.supervise.events import read_events
from overland.world.heartbeat import HEARTBEATS, node_name, read_signs
from tests.cli.processes import TINY, environment, losses, overland
from tests.cluster.slurm import Slurm, processes_of
from tests.waiting import wait_until

SITE = """\
description = "virtual nodes"
accelerator = "none"
[slurm]
gpus = "none"
devices_per_node = {ranks_per_node}
cpus_per_task = 1
[environment]
OMP_NUM_THREADS = "1"
"""
# Steps of a tenth of a second or more, so that a fault hits a run and not its end.
SLOW = """\
import time
from pathlib import Path
from overland.training.callbacks import Callback, register_callback

@register_callback
class Slow(Callback):
    def on_step(self, run):
        time.sleep(float(Path(__file__).with_name("step_seconds").read_text()))
"""
AGENT = "overland.cluster.agent"
# A process of its own, ahead of all others where it may be. A turn ends when the rank has computed
# for 0.3 ms, or has waited: on a busy machine it gets as far as on an idle one, only later.
PULSE = """\
import contextlib, os, signal, sys, time
from pathlib import Path
with contextlib.suppress(PermissionError):
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
pid = int(sys.argv[1])
used = lambda: int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
while True:
    os.kill(pid, signal.SIGCONT)
    end, deadline = used() + 300_000, time.monotonic() + 0.01
    while used() < end and time.monotonic() < deadline:
        time.sleep(0.0001)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.002)
"""


class SubmittedRun:
    def __init__(
        self,
        slurm: Slurm,
        folder: Path,
        steps: int,
        nodes: int,
        *flags: str,
        settings: list[str] | None = None,
        ranks_per_node: int = 2,
        step_seconds: float = 0.1,
        module: str = SLOW,
        environment: str = "",
    ) -> None:
        self.slurm, self.folder, self.steps = slurm, folder, steps
        self.num_ranks = nodes * ranks_per_node
        self.root = folder / "runs" / "quickstart"
        self.settings = [*self.settings_of(steps), *(settings or [])]
        folder.mkdir(parents=True, exist_ok=True)
        site = SITE.format(ranks_per_node=ranks_per_node) + environment
        (folder / "site.toml").write_text(site)
        (folder / "slow.py").write_text(module)
        self.set_pace(step_seconds)
        self.nodes = nodes
        self.jobs: list[int] = []
        self.submit(*flags)

    @staticmethod
    def settings_of(steps: int) -> list[str]:
        return [
            *TINY,
            f"training.steps={steps}",
            "training.dataset=random",
            "metrics.sample_prompt=",
            "metrics.enable_tensorboard=false",
            "validation.enable=false",
            "checkpoint.interval=10",
            "health.hang_seconds=12",
            "job.custom_import=slow",
        ]

    def submit(self, *flags: str) -> None:
        """Also again, once its jobs are over."""
        words = ["submit", "quickstart", *self.settings, "--site", "site.toml", "--nodes"]
        env = self.slurm.environment(environment())
        done = overland(*words, str(self.nodes), "--json", *flags, cwd=self.folder, **env)
        self.jobs += [int(job) for job in json.loads(done.stdout)["jobs"]]

    def set_pace(self, step_seconds: float) -> None:
        """From the next step on."""
        set_pace(self.folder, step_seconds)

    # What it tells

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        return [event for event in read_events(self.root) if kind in (None, event["event"])]

    def live(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.root / "live.json").read_text()))
        except (OSError, ValueError):
            return {}

    def log(self, job: int | None = None) -> str:
        path = self.root / "logs" / f"job-{job or self.jobs[0]}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def step(self) -> int:
        path = self.root / "metrics.jsonl"
        return max(losses(path), default=0) if path.exists() else 0

    def live_step(self) -> int:
        """As the ranks have it in memory, whatever the disk takes; 0 when none is alive."""
        signs = [
            sign
            for _, env, _ in self._processes()
            if HEARTBEATS in env and "SLURM_PROCID" in env
            for sign in read_signs(Path(f"{env[HEARTBEATS]}-{node_name(env)}"))
        ]
        return max((sign.step for sign in signs), default=0)

    def wait_until(self, is_true: Callable[[], bool], what: str) -> None:

        def has_happened() -> bool:
            ended = self.events("end")
            assert not ended, f"it ended before {what}: {ended}\n{self.log()[-5000:]}"
            return is_true()

        wait_until(has_happened, what, lambda: self.log()[-5000:])

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: self.step() >= step, f"step {step}")

    def survives(self, kind: str, act: Callable[[], object]) -> None:
        """Lets it happen, and waits until training has gone on from it. A busy machine may cause
        a hang of its own besides."""

        def recovered() -> int:
            return sum(event["kind"] == kind for event in self.events("recovered"))

        before = recovered()
        act()
        self.wait_until(lambda: recovered() > before, f"it recovers from a {kind}")

    def finish_chain(self, *flags: str, minutes: int) -> list[str]:
        """Waits for its jobs, which take so long each, until the work is done and one more job was
        there; returns what Slurm says of each. As long as work is left, more are submitted with
        these flags, and longer ones: how many it takes depends on the machine, and on a slow one
        a start alone may take two minutes."""
        shown: list[str] = []
        while len(shown) < len(self.jobs):
            shown.append(self.slurm.wait_for(self.jobs[len(shown)], self.log))
            is_done = (self.root / "done").exists()
            is_surplus = is_done and len(self.events("end")) < len(shown)
            if len(shown) == len(self.jobs) and not is_surplus:
                minutes = min(2 * minutes, 32)
                self.submit(*flags, "--time", f"00:{minutes:02}:00")
        return shown

    def wait(self) -> str:
        """Until the last job has ended; what Slurm says of it."""
        return [self.slurm.wait_for(job, self.log) for job in self.jobs][-1]

    # What happens to it

    def ranks(self) -> dict[int, tuple[int, str]]:
        """Process and node of every rank that is alive."""
        found = {}
        for pid, env, command in self._processes():
            if "train" in command and "python" in Path(command[0]).name:
                found[int(env["SLURM_PROCID"])] = pid, env["SLURMD_NODENAME"]
        return found

    def agents(self) -> list[int]:
        """The processes that watch over a node's ranks."""
        return [pid for pid, _, command in self._processes() if AGENT in command[1:]]

    def is_training(self) -> bool:
        """Whether this attempt has done a step."""
        [*_, attempt] = self.events("attempt")
        metrics = self.root / "metrics.jsonl"
        is_its_own = metrics.exists() and metrics.stat().st_mtime > attempt["time"]
        return is_its_own and self.step() > attempt["from_step"]

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.ranks()[rank][0], number)

    def slow_until(self, rank: int, is_true: Callable[[], bool], what: str) -> None:
        """Stops a rank again and again, like a throttled device. What a rank times of itself takes
        about a ms, and must not fit in between. On a busy machine it may be taken for a hang: then
        the rank that takes its place is slowed, once it trains."""
        pulses: dict[int, subprocess.Popen[bytes]] = {}

        def is_done() -> bool:
            pid, _ = self.ranks().get(rank, (0, ""))
            if pid and pid not in pulses and self.is_training():
                pulses[pid] = subprocess.Popen(
                    [sys.executable, "-c", PULSE, str(pid)], stderr=subprocess.DEVNULL
                )
            return is_true()

        try:
            self.wait_until(is_done, what)
        finally:
            for pid, pulse in pulses.items():
                pulse.kill()
                pulse.wait()
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def kill_node(self, node: str) -> None:
        """All that runs there, in an order in which nobody can act on the others' end. A srun has
        a child that would cancel its step on all nodes."""
        here = self._processes()
        tasks = {pid: cmd for pid, env, cmd in here if env.get("SLURMD_NODENAME") == node}
        slurmd = [pid for pid, _, cmd in here if cmd[-2:] == ["-N", node]]
        supervisor = [pid for pid, cmd in tasks.items() if "supervise" in cmd]
        sruns = [pid for pid, cmd in tasks.items() if Path(cmd[0]).name == "srun"]
        sruns = sorted(sruns, key=lambda pid: parent_of(pid) not in sruns)  # children first
        of_batch, of_steps = daemons_of(supervisor), daemons_of(tasks)
        for pid in [*slurmd, *of_batch, *supervisor, *sruns, *of_steps, *tasks]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _processes(self) -> list[tuple[int, dict[str, str], list[str]]]:
        found = []
        for pid in processes_of(self.slurm.folder):
            try:
                words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
                env = dict(word.split("=", 1) for word in words.split("\0") if "=" in word)
                found.append((pid, env, command_of(pid)))
            except OSError:
                continue
        return found


def set_pace(folder: Path, step_seconds: float) -> None:
    beside = folder / "step_seconds.new"
    beside.write_text(str(step_seconds))
    beside.rename(folder / "step_seconds")


def command_of(pid: int) -> list[str]:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return words[:-1] if len(words) > 1 else words


def daemons_of(tasks: Iterable[int]) -> list[int]:
    parents = {parent_of(pid) for pid in tasks}
    return [pid for pid in parents if pid and "slurmstepd" in command_of(pid)[0]]


def parent_of(pid: int) -> int:
    try:
        found = re.search(r"^PPid:\t(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def train_unbroken(run: SubmittedRun, folder: Path) -> Path:
    """The same training by a plain `overland train` that nothing happens to; its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "slow.py").write_text((run.folder / "slow.py").read_text())
    set_pace(folder, 0)
    overland("train", "quickstart", *run.settings, cwd=folder, NGPU=str(run.num_ranks))
    return folder / "runs" / "quickstart"


def final_state(run: Path) -> dict[str, bytes]:
    """Every tensor of the last checkpoint, bit for bit: weights, moments, random states."""
    path = latest_checkpoint(run / "checkpoint")
    assert path is not None
    with open_checkpoint(path) as checkpoint:
        return {
            name: checkpoint.read(name).reshape(-1).view(torch.uint8).numpy().tobytes()
            for name in checkpoint.tensors
        }
