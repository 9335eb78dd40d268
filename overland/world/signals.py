"""Signals that ask a run to stop, before and after the training loop (inside it: training/stop.py),
and the line that a rank prints before it ends.

Before the loop there is nothing to save, and after it everything is saved: a signal then ends the
process at once. In between, the loop handles them (training/stop.py). Schedulers send SIGUSR1 and
SIGUSR2 to warn of a job's end; after the loop they are ignored, since the run is about to end.
Nothing heavy is imported here, so that the handlers are set before the imports that take seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import FrameType

from overland.errors import Kind
from overland.world.heartbeat import HEARTBEATS, node_name

STOPPED = 75  # exit code: "temporary failure, try again" in sysexits.h
INTERRUPTED = 130  # exit code after a second Ctrl-C, as in shells
ENDED_AT_ONCE = "ended at once; the last checkpoint is kept"  # printed after a second Ctrl-C
# Set for ranks started by a launcher on this machine. The launcher has printed the config's notes,
# and ends all ranks at a second Ctrl-C: if one left first, the collectives of the others would
# fail.
LAUNCHED = "OVERLAND_LAUNCHED"
# The file in which ranks that print also note their errors, for their launcher.
ERRORS = "OVERLAND_ERRORS"
# A terminal that is closed, or an ssh connection that breaks, sends SIGHUP; nohup ignores it.
IS_IGNORED = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
HANGUP = () if IS_IGNORED else (signal.SIGHUP,)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, *HANGUP)
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
Handler = Callable[[int, FrameType | None], object] | int | None
# Found now: they may be redirected later.
TERMINALS = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
# A terminal sends Ctrl-C to every process of a run, and the launcher passes its own on: signals
# within this time are one key press.
SAME_PRESS_SECONDS = 1.0


SHOW_CURSOR = b"\r\x1b[K\x1b[?25h"  # on an empty line


def end_at_signal(words: str) -> None:
    """Makes a signal end this process from now on, as stopped, with this message on rank 0."""
    for number in SIGNALS:
        signal.signal(number, _end)
    say_at_signal(words)


_words = ""


def _end(number: int, frame: FrameType | None) -> None:
    leave(STOPPED, _words)


def restore_handlers(before: Mapping[signal.Signals, Handler]) -> None:
    """Restores the handlers from before the training loop. In our own command, warnings are ignored
    instead, until the process is gone: they would cut short the export of the weights, and kill a
    Python that is exiting, which has no handlers any more but still ignores what was ignored."""
    for number, handler in before.items():
        is_ours = handler is _end and number in WARNINGS
        signal.signal(number, signal.SIG_IGN if is_ours else handler)


def say_at_signal(words: str) -> None:
    """Sets the message from now on, for a process that ends at a signal. In a user's own program,
    signals do what that program wants."""
    global _words
    _words = words


def restore_terminal() -> None:
    """Ends the status line at the bottom of the terminal, and shows the cursor again."""
    if 1 in TERMINALS and os.environ.get("TERM") not in ("dumb", None):
        with contextlib.suppress(OSError):
            os.write(1, SHOW_CURSOR)


def leave_terminal(number: int) -> None:
    """Redirects output to /dev/null after SIGHUP: the terminal is gone, and writing to it fails."""
    if number != signal.SIGHUP:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in TERMINALS:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def leave(code: int, words: str) -> None:
    """Ends the process immediately. Python's own exit would wait for threads and devices."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        if rank == 0:
            restore_terminal()
            os.write(sys.stderr.fileno(), f"{words}\n".encode())
        if HEARTBEATS in os.environ and code == STOPPED:
            os.write(sys.stdout.fileno(), f"{last_words(rank, Kind.STOPPED, words)}\n".encode())
    finally:
        os._exit(code)


SAYS = "overland says: "
# Printed by the shell around a rank, with the node, if its exit code was 0.
ENDED = "overland ended: "


@dataclass(frozen=True)
class Said:
    """A rank's last words."""

    rank: int
    node: str
    kind: Kind
    what: str
    time: float
    step: int = 0
    place: str = ""
    """Where in the program it happened, if that distinguishes two errors."""


def say(rank: int, kind: Kind, what: str, step: int = 0, place: str = "") -> None:
    """Prints a rank's last words for the supervisor, which reads its output."""
    print(last_words(rank, kind, what, step, place), flush=True)


def last_words(rank: int, kind: Kind, what: str, step: int = 0, place: str = "") -> str:
    if kind is Kind.NETWORK:  # libraries add source locations and advice that does not apply
        what = re.sub(r"\[/[^\]]*\]\s*", "", what).split(". ")[0]
    said = Said(rank, node_name(), kind, " ".join(what.split())[:500], time.time(), step, place)
    return f"\n{SAYS}{json.dumps(asdict(said))}"
