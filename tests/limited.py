"""A call in a child process that may take little memory and time: what a hostile file must not
exceed. Code that does fails its test, and takes neither pytest nor the machine with it."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


def limited(call: Callable[[], Any], megabytes: int = 512, seconds: int = 30) -> str:
    """What `call` ended with: `read`, `<class of the error>: <its text>`, or how it died. Seconds
    are those of the processor, so that a busy machine changes nothing. `call` reads, and
    computes nothing with torch: of a fork, only the thread that forked lives on."""
    receive, send = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds,) * 2)
        signal.alarm(600)  # for what waits and computes nothing
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # without pytest's page of stacks
        try:
            call()
            ended = "read"
        except BaseException as error:
            ended = f"{type(error).__name__}: {str(error)[:500]}"
        os.write(send, ended.encode("utf-8", "replace"))
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as file:
        said = file.read().decode("utf-8", "replace")
    status = os.waitpid(child, 0)[1]
    return said or f"died of {signal.Signals(os.WTERMSIG(status)).name}"
