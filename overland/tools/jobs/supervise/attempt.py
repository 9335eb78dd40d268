"""One try at training: the ranks as srun started them, what they say, and how they are ended."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from overland.slurm import ask, signal_step
from overland.tools.jobs.supervise.faults import Findings

END_SECONDS = 20.0


def srun_on(launch: Sequence[str], nodes: Sequence[str], tasks_per_node: int) -> list[str]:
    """The launch line of a job script, on these nodes. `--overlap`: a step on a node that is gone
    holds its cores on all others, and srun would wait for them without end."""
    program, *rest = launch
    return [
        program,
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes) * tasks_per_node}",
        f"--nodelist={','.join(nodes)}",
        "--overlap",
        *rest,
    ]


class Attempt:
    def __init__(self, command: Sequence[str], env: Mapping[str, str], num_nodes: int) -> None:
        self.findings = Findings(num_nodes)
        self.step_id = ""
        """Slurm's name for it, once a node has told."""
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._srun = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
            start_new_session=True,  # a signal to the job's shell is not for the ranks
        )
        self._reader = threading.Thread(target=self._read, name="output", daemon=True)
        self._reader.start()

    def listen(self) -> None:
        """Takes in what was said since; shows what is for the log."""
        while True:
            try:
                line = self._lines.get_nowait()
            except queue.Empty:
                break
            if not self.findings.read(line) and line.strip():
                with contextlib.suppress(OSError):  # the log may be on the disk that is full
                    print(line.rstrip("\n"), flush=True)

    def code(self) -> int | None:
        """srun's exit code, once it has ended and everything it said has been heard."""
        code = self._srun.poll()
        if code is not None:
            self._reader.join(timeout=5)
            self.listen()
        return code

    def signal(self, number: int) -> bool:
        """To all ranks; returns whether there are any to send it to, as far as is known."""
        if self.step_id:
            signal_step(self.step_id, number)
        return bool(self.step_id)

    def end(self) -> None:
        """No rank is left afterwards on any node that can be reached. srun may wait long for one
        that cannot, and is not waited for."""
        if self.code() is not None:
            return
        if step := self.step_id or self._ask_for_step():
            signal_step(step, signal.SIGKILL)
        deadline = time.monotonic() + END_SECONDS
        while self._srun.poll() is None and time.monotonic() < deadline:
            self.listen()
            if self.findings.lost and step and time.monotonic() > deadline - 15:
                break
            time.sleep(0.1)
        if self._srun.poll() is None:
            self._srun.kill()
        self._srun.wait()
        self.code()

    def _read(self) -> None:
        assert self._srun.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self._srun.stdout:
                self._lines.put(line)

    def _ask_for_step(self) -> str:
        """The newest step of this job but for its guards: ours, if no node has called yet."""
        job = os.environ.get("SLURM_JOB_ID", "")
        shown = ask("squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i %j")
        steps = [int(number) for number in re.findall(rf"{job}\.(\d+) (?!guard\b)", shown)]
        return f"{job}.{max(steps)}" if job and steps else ""
