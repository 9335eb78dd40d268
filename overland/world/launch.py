"""Starts one process per local device, waits for them, ends the others when one fails, and shows
why.

A rank that should not print (`LOG_RANK`) writes to `logs/rank_N.log` in the run folder. The first
rank to fail ends the others, and the end of its log is shown, unless it is an error that another
rank has already printed; if it gave up waiting for another rank, that one is named. Ctrl-C reaches
all ranks through the terminal: they finish their step, save and exit; a second one ends them at
once. Closing the terminal also makes them save and exit, by SIGHUP.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType

from overland.errors import NotSavedError
from overland.processes import PYTHON, STOPPED_STATES, state_of, wait_for_all
from overland.world.flight_recorder import last_wait, take_last_wait
from overland.world.heartbeat import LAUNCHER_HEARTBEATS, MEMORY, read_error, read_signs, waited_for
from overland.world.rendezvous import FIRST_PORT, SECRET, new_secret
from overland.world.signals import (
    ENDED_AT_ONCE,
    ERRORS,
    INTERRUPTED,
    LAUNCHED,
    SAME_PRESS_SECONDS,
    SIGNALS,
    STOPPED,
    leave_terminal,
    restore_handlers,
    restore_terminal,
)

GRACE_SECONDS = 10.0
STOP_SECONDS = 60.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOG_TAIL_LINES = 20
SETTLE_SECONDS = 1.0  # other ranks that wait fail within this time of the first
# As gloo, NCCL and torch's store say it. A download of a rank may time out, too.
TIMED_OUT = re.compile(r"(gloo|nccl|c10d).*(timed out|timeout)", re.IGNORECASE | re.DOTALL)


def launch_local(
    arguments: Sequence[str], num_ranks: int, log_ranks: Collection[int], log_folder: Path
) -> int:
    """Runs `overland ARGUMENTS` on `num_ranks` processes; returns their exit code."""
    log_folder.mkdir(parents=True, exist_ok=True)
    if (words := take_last_wait(log_folder)) and log_ranks:  # before ranks write new records
        print(f"note: {words}", file=sys.stderr)
    memory = MEMORY if os.access(MEMORY, os.W_OK) else None
    beats = Path(tempfile.mkdtemp(prefix="overland-", dir=memory))
    shared_env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        LAUNCHED: "1",
        SECRET: new_secret(),
        LAUNCHER_HEARTBEATS: str(beats),
    }
    shared_env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    logs = {rank: log_folder / f"rank_{rank}.log" for rank in range(num_ranks)}
    before = {rank: log.stat().st_size for rank, log in logs.items() if log.exists()}

    errors = log_folder / ".errors"
    errors.unlink(missing_ok=True)

    ranks: list[subprocess.Popen[bytes]] = []
    for rank in range(num_ranks):
        env = {**shared_env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [*PYTHON, "-m", "overland", *arguments]
        is_shown = rank in log_ranks
        if is_shown:
            env[ERRORS] = str(errors.absolute())
        with contextlib.nullcontext() if is_shown else logs[rank].open("ab") as log:
            ranks.append(
                subprocess.Popen(
                    command,
                    env=env,
                    stdout=log,
                    stderr=None if is_shown else subprocess.STDOUT,
                    preexec_fn=_end_with_launcher(),
                )
            )
    with _interrupts_go_to(ranks) as presses:
        failed = _wait(ranks)
        awaited = _awaited(failed, ranks, beats, log_folder) if failed is not None else ""
        _end(ranks)
    shutil.rmtree(beats, ignore_errors=True)
    printed = errors.read_text(encoding="utf-8").strip() if errors.exists() else ""
    errors.unlink(missing_ok=True)
    is_cut_short = len(presses) > 1
    if is_cut_short or failed is not None:  # the rank that drew there may be gone
        restore_terminal()
    if is_cut_short:
        print(ENDED_AT_ONCE, file=sys.stderr)
        return INTERRUPTED
    if failed is None:
        return max(rank.returncode for rank in ranks)
    code = ranks[failed].returncode
    if failed not in log_ranks:
        _show_end_of(logs[failed], failed, before.get(failed, 0), printed)
    if code < 0:
        print(f"rank {failed} was ended by {signal.Signals(-code).name}", file=sys.stderr)
    if awaited:
        print(awaited, file=sys.stderr)
    return code if code > 0 else 128 - code


def _end_with_launcher() -> Callable[[], object] | None:
    """Makes Linux send a rank SIGTERM when the launcher dies, even by SIGKILL: the rank then saves
    and ends instead of training on unattended."""
    if sys.platform != "linux":
        return None
    set_option = ctypes.CDLL(None).prctl  # looked up before the fork, after which little is allowed
    return lambda: set_option(PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """Returns a port that no connection of another program can take before rank 0 opens it: one
    below those that the system assigns and those that follow from jobs, if any is free there."""
    drawn = random.SystemRandom().sample(range(FIRST_PORT // 2, FIRST_PORT), 100)
    for port in drawn:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int | None:
    """Waits for all ranks, or for the first failure; returns the rank that failed. Ranks stop
    together; if one stopped alone, before the others could learn of it, nobody waits for them."""
    alone_since = float("inf")
    while True:
        codes = [rank.poll() for rank in ranks]
        if STOPPED in codes:
            alone_since = min(alone_since, time.monotonic())
            if time.monotonic() - alone_since > STOP_SECONDS:
                return None
        failed = next((i for i, code in enumerate(codes) if code not in (None, 0, STOPPED)), None)
        if failed is not None:
            if codes[failed] == NotSavedError.exit_code:  # all ranks know, and the first says so
                wait_for_all(ranks, GRACE_SECONDS)
            return failed
        if all(code is not None for code in codes):
            return None
        time.sleep(0.05)


def _awaited(
    failed: int, ranks: list[subprocess.Popen[bytes]], beats: Path, log_folder: Path
) -> str:
    """Returns which rank the others waited for, if any gave up waiting: NCCL then aborts its
    process; gloo raises an error, and another rank that loses its connection may end first."""
    errors = [read_error(beats, rank) for rank in range(len(ranks))]
    if ranks[failed].returncode != -signal.SIGABRT and not any(map(TIMED_OUT.search, errors)):
        return ""
    wait_for_all(ranks, SETTLE_SECONDS)  # those that waited, too, are then seen to end
    return waited_for(read_signs(beats), len(ranks)) or last_wait(log_folder, len(ranks))


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Sends SIGKILL after a grace period: a rank stuck in a collective never sees SIGTERM. One
    that was stopped sees no signal but that."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
            if state_of(rank.pid) in STOPPED_STATES:
                rank.kill()
    wait_for_all(ranks, GRACE_SECONDS)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
        rank.wait()


@contextlib.contextmanager
def _interrupts_go_to(ranks: list[subprocess.Popen[bytes]]) -> Iterator[list[float]]:
    """Passes interrupts on to the ranks, which finish their step and save; a second Ctrl-C ends
    them at once. Yields when Ctrl-C was pressed."""
    presses: list[float] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        leave_terminal(number)
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if presses and time.monotonic() - presses[-1] < SAME_PRESS_SECONDS:
            return
        presses.append(time.monotonic())
        if len(presses) == 1:
            pass_on(number, frame)
        else:
            for rank in ranks:
                rank.kill()

    handlers = dict.fromkeys(SIGNALS, pass_on) | {signal.SIGINT: interrupt}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield presses
    finally:
        restore_handlers(before)


def _show_end_of(log: Path, rank: int, start: int, printed: str) -> None:
    """Prints the end of a log, unless it is the error that another rank has printed. What was in it
    before `start` belongs to an earlier session."""
    with log.open("rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace").strip()
    if printed and text.endswith(printed):
        return
    lines = text.splitlines()[-LOG_TAIL_LINES:]
    print(f"rank {rank} failed; the end of {log}:", *lines, sep="\n  ", file=sys.stderr)
