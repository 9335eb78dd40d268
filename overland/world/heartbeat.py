"""A rank's heartbeat: its step and phase, the bytes it reads from or writes to disk, and, from all
of them, which rank the others wait for.

All of it is a few bytes of shared memory. Writing them takes a microsecond and no system call, so
every rank does it at every change of phase. They are in a folder in the node's memory, where the
node's agent reads them; next to them is a file for the stacks of all threads, which a signal
handler writes whatever the rank is stuck in.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from overland.errors import OverlandError
from overland.processes import STOPPED_STATES, age_of_process, state_of
from overland.words import name_ranks

HEARTBEATS = "OVERLAND_BEATS"  # the prefix of the folders on all nodes, which agents read
# The folder that the launcher of this machine reads, once a rank has failed.
LAUNCHER_HEARTBEATS = "OVERLAND_LAUNCHER_BEATS"
LAYOUT = struct.Struct("<qqqddd")
PULSE_LAYOUT = struct.Struct("<qdqq")
SIZE = LAYOUT.size + PULSE_LAYOUT.size
MEMORY = Path("/dev/shm")


class Phase(IntEnum):
    """What a rank is doing, in order: among ranks that wait for one another, the others wait for
    the one that is furthest behind."""

    STARTING = 0
    JOINING = 1
    BUILDING = 2
    LOADING = 3
    DATA = 4
    COMPUTING = 5
    REPORTING = 6
    VALIDATING = 7
    SAVING = 8
    ENDING = 9
    STOPPED = 10
    FINISHED = 11

    @property
    def words(self) -> str:
        return PHASE_WORDS[self]


PHASE_WORDS = (
    "starting", "joining the other ranks", "building the model", "loading a checkpoint",
    "waiting for data", "computing", "writing its log", "validating", "saving", "ending", "stopped",
    "finished",
)  # fmt: skip


class Transfer(IntEnum):
    """A rank's part in saving or loading a checkpoint."""

    NONE = 0
    MOVING = 1
    """It is reading or writing."""
    WAITING = 2
    """It is waiting for other ranks or for its device."""


@dataclass(frozen=True)
class Sign:
    """The last heartbeat of a rank. `since` and `moved` are times on the node's own clock."""

    rank: int
    pid: int
    step: int
    phase: Phase
    since: float
    probe_seconds: float
    data_wait: float
    transfer: Transfer
    moved: float
    num_bytes: int
    total_bytes: int


class Pulse:
    """Counts the bytes that a rank reads and writes, so that a slow save can be distinguished from
    one that hangs. Saves run in the background: any thread may call it."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._memory, self._lock = memory, threading.Lock()
        self._set(Transfer.NONE, 0, 0)

    def begin(self, total_bytes: int = 0) -> None:
        self._set(Transfer.MOVING, 0, total_bytes)

    def moved(self, num_bytes: int = 0) -> None:
        """Counts bytes that were moved, or a finished disk operation."""
        self._set(Transfer.MOVING, num_bytes)

    def wait(self) -> None:
        """Records that this rank is now waiting for something other than the disk."""
        self._set(Transfer.WAITING)

    def end(self) -> None:
        self._set(Transfer.NONE)

    @property
    def quiet_seconds(self) -> float:
        """How long nothing has moved; 0 if the rank has nothing to move."""
        return time.monotonic() - self._moved if self._state is Transfer.MOVING else 0.0

    def _set(self, state: Transfer, more_bytes: int = 0, total_bytes: int | None = None) -> None:
        with self._lock:
            self._state, self._moved = state, time.monotonic()
            if total_bytes is not None:  # a new transfer
                self._num_bytes, self._total_bytes = 0, total_bytes
            self._num_bytes += more_bytes
            self._memory[LAYOUT.size :] = PULSE_LAYOUT.pack(
                state, self._moved, self._num_bytes, self._total_bytes
            )


class Heartbeat:
    """Writes the heartbeat of a rank; without a folder, nobody reads it."""

    def __init__(
        self, rank: int = 0, folder: Path | None = None, is_supervised: bool = False
    ) -> None:
        self.is_supervised = is_supervised
        self.on_error: Callable[[Exception], object] = lambda error: None
        self._has_failed = False
        self.step, self.phase, self._since = 0, Phase.STARTING, time.monotonic()
        self.doing = self.phase.words
        self.words: dict[Phase, str] = {}
        """Overrides of how a phase is described, such as "compiling" for the first step."""
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._seconds[Phase.STARTING] = age_of_process()
        self.probe_seconds = self.data_wait = 0.0
        self._memory: mmap.mmap | bytearray = bytearray(SIZE)
        if folder is not None:
            with (folder / f"{rank}.beat").open("w+b") as file:
                os.posix_fallocate(file.fileno(), 0, SIZE)  # a full disk is an error here, no crash
                self._memory = mmap.mmap(file.fileno(), SIZE)
        self.pulse = Pulse(self._memory)
        self.enter(Phase.STARTING)

    def enter(self, phase: Phase, step: int | None = None, doing: str = "") -> None:
        """Enters a phase. `doing` describes the activity if that is more specific than the
        phase."""
        now = time.monotonic()
        self._seconds[self.phase] += now - self._since
        self.phase, self._since = phase, now
        self.doing = doing or self.words.get(phase) or phase.words
        self.step = self.step if step is None else step
        # In one assignment: pack_into first clears what it writes, and a reader could see that.
        self._memory[: LAYOUT.size] = LAYOUT.pack(
            os.getpid(), self.step, phase, now, self.probe_seconds, self.data_wait
        )

    def report(self, error: Exception) -> None:
        """Reports the error that ends this rank, once. To be called before it leaves the others,
        who fail a moment later and may be heard first."""
        if not self._has_failed:
            self._has_failed = True
            self.on_error(error)

    @property
    def seconds_here(self) -> float:
        """How long the rank has been in this phase."""
        return time.monotonic() - self._since

    def seconds_in(self, *phases: Phase) -> float:
        """Returns how long this rank has spent in these phases since its process started."""
        total = sum(self._seconds[phase] for phase in phases)
        return total + (time.monotonic() - self._since if self.phase in phases else 0.0)


def node_name(env: Mapping[str, str] = os.environ) -> str:
    """Returns Slurm's name for this node; several of its nodes may be on one host."""
    return env.get("SLURMD_NODENAME") or socket.gethostname()


@contextlib.contextmanager
def reporting(beat: Heartbeat) -> Iterator[None]:
    """Reports an error that passes, unless it is typer's way of ending a command."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OverlandError) or not hasattr(error, "exit_code"):
            beat.report(error)
        raise


def read_signs(folder: Path) -> list[Sign]:
    """Reads the last heartbeats of all ranks of this node that have started."""
    signs = []
    for path in folder.glob("*.beat"):
        data = b""
        while data != (data := path.read_bytes()):  # consistent if it is the same twice
            pass
        if len(data) == SIZE and any(data[: LAYOUT.size]):
            pid, step, phase, since, probe, wait = LAYOUT.unpack_from(data)
            transfer, moved, num_bytes, total = PULSE_LAYOUT.unpack_from(data, LAYOUT.size)
            place = int(path.stem), pid, step, Phase(phase)
            disk = Transfer(transfer), moved, num_bytes, total
            signs.append(Sign(*place, since, probe, wait, *disk))
    return sorted(signs, key=lambda sign: sign.rank)


def read_error(folder: Path, rank: int) -> str:
    """Returns the error that ended a rank, if it could note one for its launcher."""
    try:
        return (folder / f"{rank}.error").read_text()
    except OSError:
        return ""


def behind(places: Mapping[int, tuple[int, Phase]]) -> list[int]:
    """Returns the ranks that are furthest behind in step and phase: those that the others wait for,
    if they are fewer than half of all, or one of two."""
    least = min(places.values(), default=None)
    found = sorted(rank for rank, place in places.items() if place == least)
    if len(places) == 2 and len(found) == 1:
        return [] if _may_be_ahead(*sorted(places.values())) else found
    return found if 2 * len(found) < len(places) else []


def _may_be_ahead(least: tuple[int, Phase], other: tuple[int, Phase]) -> bool:
    """Whether a rank that looks behind may in fact be ahead: it returns to building after it has
    loaded a checkpoint or computed a reference, and to an earlier step after a loss spike, which it
    handles in the phase of saving."""
    if least[0] < other[0]:
        return other[1] is Phase.SAVING
    return least[1] is Phase.BUILDING and other[1] in (Phase.LOADING, Phase.VALIDATING)


def waited_for(signs: Sequence[Sign], num_ranks: int) -> str:
    """Returns which rank of this machine the others wait for: one whose process is stopped, or that
    is behind; empty if none stands out."""
    states = {sign.rank: state_of(sign.pid) for sign in signs}
    stopped = [rank for rank, state in states.items() if state in STOPPED_STATES]
    late = stopped
    if not stopped and len(signs) == num_ranks:  # a rank without a heartbeat may be further behind
        late = behind({sign.rank: (sign.step, sign.phase) for sign in signs})
    if not late or len(late) == num_ranks:
        return ""
    sign = next(sign for sign in signs if sign.rank == late[0])
    how = "was stopped (SIGSTOP)" if stopped else "was behind them"
    seconds = max(0.0, time.monotonic() - sign.since)
    return (
        f"the others waited for {name_ranks(late)}, which {how}: at step {sign.step}, "
        f"{sign.phase.words}, for {seconds:.0f} s"
    )
