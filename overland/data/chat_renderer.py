"""Runs chat templates in a process of their own, `chat_sandbox`, whose time and memory are limited.

The process is started for the first template and then reused; if a template exceeds the limits, it
ends, and the next template gets a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from overland.data.chat_sandbox import SIZE
from overland.errors import DataError
from overland.plugins import need
from overland.processes import PYTHON

SECONDS = 10  # of the processor, for one text; a conversation takes milliseconds
MEGABYTES = 1000
SANDBOX = Path(__file__).with_name("chat_sandbox.py")
# By its path and without `site`, it starts in a tenth of a second: importing it would import numpy.
START = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "runpy.run_path(sys.argv[2], run_name='__main__')"
)


class Rejected(Exception):
    """Raised for a conversation that the template itself rejects; the message is its own."""


class Endless(Exception):
    """Raised for a template that exceeds the limits."""


class Renderer:
    """The parent's side of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, *request: Any) -> list[str]:
        """Returns the texts that a template writes; see `chat_sandbox` for the request."""
        try:
            data = pickle.dumps(request)
        except Exception as error:  # pickle raises nothing more specific
            raise Rejected(f"it holds something other than text and numbers: {error}") from None
        with self._lock:
            try:
                # A process may also be ended by others, such as a kernel that is out of memory.
                answer = self._answer(data) or self._answer(data)
            except (
                BaseException
            ):  # Ctrl-C: its answer must not be taken for that to a later request
                self.close()
                raise
        kind, found = answer if answer is not None else ("endless", "its process was killed")
        if kind == "texts":
            return [found[0][:text] if isinstance(text, int) else text for text in found]
        if kind == "invalid":
            raise DataError(f"the chat template cannot be parsed{found}")
        raise (Rejected if kind == "rejects" else Endless)(found)

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def forget(self) -> None:
        """Leaves the process to the parent that this process was forked from."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._process.returncode = 0
            self._process = None

    def _answer(self, data: bytes) -> Any:
        """Returns the answer, or None if the process was ended by something else."""
        process = self._process = self._process or _start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(SIZE.pack(len(data)) + data)
            process.stdin.flush()
            answer = process.stdout.read(*SIZE.unpack(process.stdout.read(SIZE.size)))
            found = json.loads(answer.decode("utf-8", "surrogatepass"))
            if found[0] == "endless":
                self.close()  # its memory may be full
            return found
        except (OSError, ValueError, struct.error):
            pass  # it has ended, perhaps while it answered
        self._process = None
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        if process.wait() == -signal.SIGXCPU:
            return "endless", f"it computes for more than {SECONDS} seconds"
        return None


def _start() -> subprocess.Popen[bytes]:
    need("jinja2", "a chat template", "text")
    path = json.dumps([entry or os.getcwd() for entry in sys.path])
    limits = (str(SECONDS), str(MEGABYTES))
    return subprocess.Popen(
        [*PYTHON, "-S", "-c", START, path, str(SANDBOX), *limits],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


renderer = Renderer()
atexit.register(renderer.close)
os.register_at_fork(after_in_child=renderer.forget)
