"""Bash as a reader of the docs uses it, with an `overland` that is forked from a warm process."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, NamedTuple

from tests.cli.processes import environment
from tests.cli.warm import server
from tests.waiting import LIMIT_SECONDS

# Stands on the PATH as `overland`. It hands its words, folder, variables and outputs to the test,
# which forks the command, and passes signals and the exit code on.
STAND_IN = """#!{python} -SE
import json, os, signal, socket, sys
test = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
test.connect({address!r})
request = {{"words": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}
socket.send_fds(test, [json.dumps(request).encode()], [1, 2])
pid = int(test.recv(64))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(test.recv(64))
sys.exit(code if code >= 0 else 128 - code)
"""


class Said(NamedTuple):
    code: int
    text: str


class Shell:
    """Runs scripts, one after another, in one folder."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        # A socket's name may have 107 characters, which is less than some temporary folders have.
        self._tools = tempfile.TemporaryDirectory(prefix="overland-docs-")
        tools = Path(self._tools.name)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(tools / "socket"))
        self._listener.listen()
        stand_in = tools / "overland"
        stand_in.write_text(
            STAND_IN.format(python=sys.executable, address=str(tools / "socket")), encoding="utf-8"
        )
        stand_in.chmod(0o755)
        path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._env = environment(PATH=path, PYTHONUNBUFFERED="1", **env)
        self._waiting: dict[int, socket.socket] = {}

    def run(self, script: str) -> Said:
        """Runs a script, which ends at the first command that fails."""
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                ["bash", "-e", "-o", "pipefail", "-c", script],
                cwd=self.folder, env=self._env, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            self._serve_until_the_end_of(process, output)
            return Said(process.returncode, _text_of(output))

    def close(self) -> None:
        self._listener.close()
        self._tools.cleanup()

    def _serve_until_the_end_of(self, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while process.poll() is None:
                if selector.select(0.01):
                    self._start()
                self._tell_codes()
                if time.monotonic() > deadline:
                    process.kill()
                    process.wait()
                    raise TimeoutError(f"still running:\n{_text_of(output)}")

    def _start(self) -> None:
        connection, _ = self._listener.accept()
        message, outputs, _, _ = socket.recv_fds(connection, 2**20, 2)
        pid = server().start(json.loads(message), outputs)
        for descriptor in outputs:
            os.close(descriptor)
        connection.send(str(pid).encode())
        self._waiting[pid] = connection

    def _tell_codes(self) -> None:
        for pid in list(self._waiting):
            code = server().code_of(pid)
            if code is not None:
                with self._waiting.pop(pid) as connection, contextlib.suppress(BrokenPipeError):
                    connection.send(str(code).encode())


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
