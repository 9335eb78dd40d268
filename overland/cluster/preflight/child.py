"""Runs work that may hang or crash in a child process, so that the task survives.

The child is forked, so that nothing has to be imported again. Therefore the task itself must never
touch a device: a CUDA context does not survive a fork.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable

from overland.cluster.wire import Message, Wire
from overland.world.launch import PR_SET_PDEATHSIG

Stage = Callable[[str], None]
"""Called with the current stage, which is named if it never ends."""

BURIAL_SECONDS = 2.0  # a process stuck in a broken driver may not even die


def in_child(work: Callable[[Stage], Message], seconds: float, wire: Wire) -> Message:
    """Returns what `work` returns, or an `error` if it raised, crashed or timed out. A message from
    the conductor meanwhile means that the answer is no longer wanted."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        wire.close()
        _work(work, writing)
    os.close(writing)
    heard, is_over = _hear(reading, wire, time.monotonic() + seconds)
    os.close(reading)
    status = _bury(child, at_once=not is_over)
    last: Message = json.loads(heard[-1]) if heard else {"stage": "the start"}
    if "stage" not in last:
        return last
    if not is_over:
        return {"error": f"did not finish within {seconds:.0f} s, in {last['stage']}"}
    ended = f"was ended by {signal.Signals(status & 0x7F).name}" if status & 0x7F else "ended"
    return {"error": f"{ended} in {last['stage']}"}


def _work(work: Callable[[Stage], Message], writing: int) -> None:
    def tell(message: Message) -> None:
        os.write(writing, json.dumps(message).encode() + b"\n")

    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        tell(work(lambda words: tell({"stage": words})))
    except BaseException as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        tell({"error": first[:300]})
    finally:
        os._exit(0)


def _hear(reading: int, wire: Wire, deadline: float) -> tuple[list[bytes], bool]:
    """Returns the lines received, and whether the child has finished writing."""
    data = b""
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([reading, wire.socket.fileno()], [], [], left)
        if reading in ready:
            part = os.read(reading, 2**16)
            data += part
            if not part:
                return data.splitlines(), True
        elif ready:
            break
    return data.splitlines(), False


def _bury(child: int, at_once: bool) -> int:
    """Waits for the child, or ends it, and returns its wait status."""
    kill_at = time.monotonic() + (0.0 if at_once else BURIAL_SECONDS)
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found or time.monotonic() > kill_at + BURIAL_SECONDS:
            return status
        if time.monotonic() >= kill_at:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
