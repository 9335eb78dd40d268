"""A real Slurm on this machine: a controller and several virtual nodes, each with its own slurmd.

Everything lives in one folder, with ports of its own, beside whatever Slurm the machine may have.
Each process of it, the jobs' included, carries the path of that folder's slurm.conf in its
environment: by that they are found and ended, one by one, also those of a test run that was killed
before it could tidy up.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from overland.world.launch import free_port
from tests.cluster.packages import program
from tests.waiting import LIMIT_SECONDS, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "salloc", "scontrol", "sinfo")

FOLDERS = "overland-slurm-"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY",
         "BOOT_FAIL", "DEADLINE")  # fmt: skip


class BrokenPipe(AssertionError):
    """A command was ended by SIGPIPE."""


CONFIG = """\
ClusterName=overland
# ports follow from job ids: two of these Slurms at once must not count alike
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
# a job that was given back waits as long as that before it runs again: 120 s by default
AuthInfo=socket={folder}/munge.socket,cred_expire=30
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
# nodes claim more cores than the machine has
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# no cgroups: containers rarely let us make any
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
# as long as a job has to say what it must after it was told to end; a busy machine is slow
KillWait=15
SchedulerParameters=batch_sched_delay=0,sched_interval=5,sched_min_interval=0
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
# what scripts for Frontier ask for
PartitionName=extended Nodes=ALL MaxTime=INFINITE State=UP
"""


class Slurm:
    def __init__(self, num_nodes: int = 4, cores: int = 8) -> None:
        end_abandoned()
        self.nodes = [f"n{i + 1}" for i in range(num_nodes)]
        self.folder = Path(tempfile.mkdtemp(prefix=f"{FOLDERS}{os.getpid()}-"))
        self.config = self.folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        (self.folder / "state").mkdir()
        self.config.write_text(self._config(cores))
        # Nothing of cgroups is used, but the plugin for version 2 wants systemd at the start.
        self.config.with_name("cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        try:
            self._start_munge()
            self._start("slurmctld", "-D", "-i")
            for node in self.nodes:
                self.start_node(node)
            self._wait_until_idle()
        except BaseException:
            self.stop()
            raise

    def environment(self, env: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Without what a Slurm around this test run may have set."""
        ours = {name: value for name, value in env.items() if not name.startswith("SLURM_")}
        return {**ours, "SLURM_CONF": str(self.config)}

    def run(
        self,
        *command: str,
        env: Mapping[str, str] = os.environ,
        code: int = 0,
        cwd: Path | None = None,
    ) -> str:
        """What `srun …`, `sbatch …` and their like print; asserts on the exit code."""
        done = subprocess.run(
            command,
            env=self.environment(env),
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        what = f"exit {done.returncode}:\n{done.stdout}\n{done.stderr}"
        if done.returncode == -signal.SIGPIPE:
            raise BrokenPipe(what)
        assert done.returncode == code, what
        return done.stdout

    def ask(self, *command: str) -> str:
        """What a command prints that only asks. On a busy machine, Slurm's own may be ended by
        SIGPIPE when its controller is slow to answer: asked again, it gets an answer."""
        for _ in range(5):
            with contextlib.suppress(BrokenPipe):
                return self.run(*command)
            time.sleep(1)
        return self.run(*command)

    def batch(
        self,
        script: str,
        *options: str,
        env: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
    ) -> tuple[int, str]:
        """Submits a script and waits for its end; returns its job id and what it wrote."""
        path = Path(tempfile.mkdtemp(dir=self.folder)) / "job.sh"
        path.write_text(f"#!/bin/bash\nset -euo pipefail\n{script}\n")
        output = path.with_suffix(".out")
        words = ["sbatch", "--parsable", f"--output={output}", *options, str(path)]
        job = int(self.run(*words, env=env, cwd=cwd))
        shown = self.wait_for(job)
        written = output.read_text() if output.exists() else ""
        assert " JobState=COMPLETED " in shown, f"{shown}\nThe job wrote:\n{written}"
        return job, written

    def wait_for(self, job: int, log: Callable[[], str] = str) -> str:
        """What Slurm says of a job that has ended. `sbatch --wait` would ask ever more rarely."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            shown = self.ask("scontrol", "show", "job", str(job), "--oneliner")
            if re.search(rf" JobState=({'|'.join(ENDED)}) ", shown):
                return shown
            assert time.monotonic() < deadline, f"{shown}\n{log()[-5000:]}\n{self._logs()}"
            time.sleep(0.2)

    def start_node(self, name: str) -> None:
        self._start("slurmd", "-D", "-N", name, called=name)

    @contextmanager
    def controller_stopped(self) -> Iterator[None]:
        """It answers nobody, as one that is busy with other jobs."""
        controller = self._daemons["slurmctld"].pid
        os.kill(controller, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(controller, signal.SIGCONT)

    def stop(self) -> None:
        end_all(self.folder)
        for daemon in self._daemons.values():
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _config(self, cores: int) -> str:
        node = (
            "NodeName={} NodeHostname={} NodeAddr=127.0.0.1 Port={} CPUs={} RealMemory=4096 "
            "Feature=nvme"
        )
        host = socket.gethostname()
        ports = free_ports(len(self.nodes) + 1)
        return CONFIG.format(
            host=host,
            port=ports.pop(),
            first_job=random.randrange(1, 60_000),
            user=getpass.getuser(),
            folder=self.folder,
            nodes="\n".join(
                node.format(name, host, port, cores)
                for name, port in zip(self.nodes, ports, strict=True)
            ),
        )

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._start(
            "munged",
            "--foreground",
            "--force",  # the folder is ours alone, so its socket is in a place others cannot see
            f"--key-file={key}",
            f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munged.pid",
            f"--seed-file={self.folder}/munged.seed",
        )
        wait_until((self.folder / "munge.socket").exists, "munged opens its socket", self._logs)

    def _start(self, name: str, *options: str, called: str = "") -> None:
        path = program(name)
        assert path is not None
        with (self.folder / f"{called or name}.out").open("ab") as out:
            self._daemons[called or name] = subprocess.Popen(
                [path, *options],
                env=self.environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the tests
            )

    def _wait_until_idle(self) -> None:
        def all_are_idle() -> bool:
            asked = subprocess.run(
                ["sinfo", "--noheader", "--Node", "--format=%N:%T"],
                env=self.environment(),
                capture_output=True,
                text=True,
            )
            return set(asked.stdout.split()) == {f"{node}:idle" for node in self.nodes}

        wait_until(all_are_idle, "all nodes are idle", self._logs)

    def _logs(self) -> str:
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"{file.name}: {file.read_text()[-2000:]}" for file in files)


def free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return sorted(ports)


def end_abandoned() -> None:
    """Ends what a test run left behind that could not tidy up: its process id is in the name."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*-*"):
        owner = re.match(rf"{FOLDERS}(\d+)-", folder.name)
        if owner and folder.stat().st_uid == os.getuid() and not Path("/proc", owner[1]).exists():
            end_all(folder)
            shutil.rmtree(folder, ignore_errors=True)


def end_all(folder: Path) -> None:
    """Ends every process of the Slurm in this folder, and those started meanwhile."""
    while found := processes_of(folder):
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def processes_of(folder: Path) -> list[int]:
    mark = f"SLURM_CONF={folder}/slurm.conf".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or someone else's
            continue
    return found
