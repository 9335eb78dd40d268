"""Decides where a run's output goes: on which ranks, as a status line at the bottom of a terminal
with messages above it, or as plain lines in pipes, under mpirun and in CI.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from overland.apps.streams import SafeConsole
from overland.config.schema import JobConfig
from overland.words import clock, duration
from overland.world import World
from overland.world.heartbeat import Heartbeat, Phase

FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
FRAMES_PER_SECOND = 8
# Without a status line, say what is taking so long after this time, then less and less often.
SILENT_SECONDS = 30.0
NO_TERMINALS = ("dumb", "unknown")

Line = Callable[[int], Text]


class PatientConsole(SafeConsole):
    """A console whose reader may exit, as `tee` does on Ctrl-C: the run continues, and saves."""

    def on_broken_pipe(self) -> None:  # rich would end the process
        self.quiet = True
        fall_silent()


def fall_silent() -> None:
    """Discards all further output, so that it cannot fail either when the process ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Screen:
    """Prints on the ranks that should print, and draws the status line while it is open."""

    def __init__(
        self, *, rank: int = 0, is_shown: bool = True, is_live: bool = False,
        no_color: bool = False, beat: Heartbeat | None = None,
    ) -> None:  # fmt: skip
        self.is_shown, self.is_live = is_shown, is_shown and is_live
        self.beat = beat or Heartbeat()
        self.line: Line = self.waiting
        self.trains = False
        """Whether steps are running, during which the phase changes all the time."""
        self._prefix = f"[rank {rank}] " if rank else ""
        self._console = PatientConsole(no_color=no_color or None, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._closed = threading.Event()

    @classmethod
    def of(
        cls, config: JobConfig, world: World, log_ranks: Collection[int], beat: Heartbeat
    ) -> Screen:
        return cls(
            rank=world.rank,
            is_shown=world.rank in log_ranks,
            is_live=world.is_first and set(log_ranks) == {0} and has_terminal(),
            no_color=config.metrics.disable_color_printing,
            beat=beat,
        )

    @property
    def is_ascii(self) -> bool:
        return self._console.options.ascii_only

    @property
    def width(self) -> int:
        return self._console.width

    def __enter__(self) -> Screen:
        if self.is_live:
            self._live = Live(
                console=self._console, get_renderable=self._drawn, transient=True,
                refresh_per_second=FRAMES_PER_SECOND,
            )  # fmt: skip
            self._live.start()
        elif self.is_shown:
            threading.Thread(target=self._speak_up, name="screen", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()
            self._live = None

    def print(self, text: str | Text) -> None:
        if self.is_shown:
            with suppress(OSError):  # a closed terminal must not end the run before it saves
                if isinstance(text, str):
                    text = self._prefix + text
                self._console.print(text)

    def waiting(self, width: int) -> Text:
        """Returns a line with the current activity and how long it has taken so far."""
        frame = int(time.monotonic() * FRAMES_PER_SECOND) % len(FRAMES)
        mark = "*" if self.is_ascii else FRAMES[frame]
        line = Text(no_wrap=True, overflow="crop")
        line.append(f"{mark} {self.beat.doing}", style="cyan")
        line.append(f"  {clock(self.beat.seconds_here)}")
        line.truncate(width)
        return line

    def _drawn(self) -> RenderableType:
        return self.line(self.width)

    def _speak_up(self) -> None:
        """Reports from time to time what is taking so long, where there is no status line."""
        said, patience = "", SILENT_SECONDS
        while not self._closed.wait(1.0):
            beat = self.beat
            doing, seconds = beat.doing, beat.seconds_here
            if doing != said:
                said, patience = doing, SILENT_SECONDS
            if seconds >= patience and not (self.trains and is_usual(beat.phase)):
                self.print(f"still {doing}, for {duration(seconds)}")
                patience = 2 * patience


def is_usual(phase: Phase) -> bool:
    """Whether this phase is part of every step."""
    return phase in (Phase.DATA, Phase.COMPUTING, Phase.REPORTING)


def has_terminal(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the output goes to an interactive terminal that can move its cursor. mpirun gives its
    ranks a terminal that nobody sees."""
    if not sys.stdout.isatty() or is_under_mpi():
        return False
    return env.get("TERM", "") not in NO_TERMINALS and env.get("CI", "") in ("", "0", "false")


def is_under_mpi(env: Mapping[str, str] = os.environ) -> bool:
    """Returns whether mpirun or mpiexec started this process. They give it a pseudo-terminal, and
    forward its output line by line."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID", "MPI_LOCALRANKID")
    return any(name in env for name in names)
