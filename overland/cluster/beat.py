"""A rank's sign of life: its step, and what it does in it, in a few bytes of shared memory.

Writing them costs a microsecond and no system call, so that every rank does it at every turn. They
lie in a folder in the node's memory, where the node's agent reads them; beside them, a file for the
stacks of all threads, which a signal writes whatever the rank is stuck in.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import secrets
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

BEATS = "OVERLAND_BEATS"  # what the folders of all nodes begin with
LAYOUT = struct.Struct("<qqqddd")
MEMORY = Path("/dev/shm")


class Phase(IntEnum):
    """In the order in which a rank goes through them: among ranks that wait for one another, the
    one that is behind is the one the others wait for."""

    STARTING = 0
    JOINING = 1
    BUILDING = 2
    DATA = 3
    COMPUTING = 4
    REPORTING = 5
    VALIDATING = 6
    SAVING = 7
    ENDING = 8
    STOPPED = 9
    FINISHED = 10

    @property
    def words(self) -> str:
        return {
            Phase.STARTING: "starting",
            Phase.JOINING: "joining the other ranks",
            Phase.BUILDING: "building the model",
            Phase.DATA: "waiting for data",
            Phase.COMPUTING: "computing",
            Phase.REPORTING: "writing its log",
            Phase.VALIDATING: "validating",
            Phase.SAVING: "saving",
            Phase.ENDING: "ending",
            Phase.STOPPED: "stopped",
            Phase.FINISHED: "finished",
        }[self]


@dataclass(frozen=True)
class Sign:
    """What a rank last said. `since` is on the node's own clock."""

    rank: int
    pid: int
    step: int
    phase: Phase
    since: float
    probe_seconds: float
    data_wait: float


class Beat:
    """A rank's own end; without a folder nobody reads it."""

    def __init__(self, rank: int = 0, folder: Path | None = None) -> None:
        self.is_read = folder is not None
        self.step, self.phase = 0, Phase.STARTING
        self.probe_seconds = self.data_wait = 0.0
        if folder is None:
            self._memory = mmap.mmap(-1, LAYOUT.size)
        else:
            with (folder / f"{rank}.beat").open("w+b") as file:
                file.truncate(LAYOUT.size)
                self._memory = mmap.mmap(file.fileno(), LAYOUT.size)
        self.enter(Phase.STARTING)

    def enter(self, phase: Phase, step: int | None = None) -> None:
        self.phase = phase
        self.step = self.step if step is None else step
        # In one piece: pack_into clears first what it then writes, and a reader could see that.
        self._memory[:] = LAYOUT.pack(
            os.getpid(), self.step, phase, time.monotonic(), self.probe_seconds, self.data_wait
        )


def node_name(env: Mapping[str, str] = os.environ) -> str:
    """As Slurm calls this node; several of its nodes may be on one host."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def beats_prefix(job: str, attempt: int) -> str:
    """In memory where there is such a folder: a slow disk would slow every step. A job that was
    requeued has the same number and attempts: what it left behind must not be taken for alive."""
    place = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
    return str(place / f"overland-{os.getuid()}-{job}-{attempt}-{secrets.token_hex(4)}")


def beats_folder(env: Mapping[str, str] = os.environ) -> Path | None:
    """Of this node; None where nobody watches. For this user's eyes alone."""
    if BEATS not in env:
        return None
    folder = Path(f"{env[BEATS]}-{node_name(env)}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def stacks_signal() -> int:
    """One that no library and no scheduler uses."""
    return signal.SIGRTMIN + 5


@contextlib.contextmanager
def beating(rank: int, env: Mapping[str, str] = os.environ) -> Iterator[Beat]:
    """The beat of this rank, with its stacks to be had by a signal."""
    folder = beats_folder(env)
    if folder is None:
        yield Beat()
        return
    stacks = (folder / f"{rank}.stacks").open(
        "w"
    )  # open to the very end: the signal is deadly else
    faulthandler.register(stacks_signal(), file=stacks, all_threads=True)
    yield Beat(rank, folder)


def read_signs(folder: Path) -> list[Sign]:
    """Of all ranks of this node that have begun."""
    signs = []
    for path in folder.glob("*.beat"):
        data = b""
        while data != (data := path.read_bytes()):  # whole, if it is the same twice
            pass
        if len(data) == LAYOUT.size and any(data):
            pid, step, phase, since, probe, wait = LAYOUT.unpack(data)
            signs.append(Sign(int(path.stem), pid, step, Phase(phase), since, probe, wait))
    return sorted(signs, key=lambda sign: sign.rank)
