"""Commands in processes that are forked after the imports.

To import torch takes seconds of a core, for every command and every rank of it, and most tests are
about what a command does then. A server has imported it all, and forks a process for each command,
as does the launcher in there for its ranks. They have the environment, folder, group, signals and
exit code of a process that was started the usual way. How a new interpreter starts, and what it
imports, is tested by those that start one by themselves: under torchrun, mpirun, Slurm, in a
terminal of its own.
"""

# ruff: noqa: SIM115 (the files stay open as long as the processes that write to them)

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.waiting import LIMIT_SECONDS

IMPORTS = (
    "overland.cli.train",
    "overland.training.loop",
    "overland.checks",
    "rich.progress",
    "torch.utils.tensorboard",
    "tokenizers",
)


class Command:
    """`overland WORDS`, or `python SCRIPT.py WORDS`, in a process group of its own; of Popen's
    interface, what tests need."""

    def __init__(
        self,
        words: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        merged: bool = False,
        into: int | None = None,
    ) -> None:
        """`merged`: errors go where the output goes; `into`: both go to this descriptor."""
        self.returncode: int | None = None
        self._out = tempfile.TemporaryFile()
        self._err = self._out if merged else tempfile.TemporaryFile()
        request = {"words": list(words), "cwd": str(cwd), "env": dict(env)}
        outputs = [self._out.fileno(), self._err.fileno()] if into is None else [into, into]
        self.pid = server().start(request, outputs)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = server().code_of(self.pid)
        return self.returncode

    def wait(self, timeout: float = LIMIT_SECONDS) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                raise TimeoutError(f"not over after {timeout:.0f} s:\n{self.stdout}\n{self.stderr}")
            time.sleep(0.01)
        return code

    def communicate(self, timeout: float = LIMIT_SECONDS) -> tuple[str, str]:
        self.wait(timeout)
        return self.stdout, self.stderr

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def stdout(self) -> str:
        return _text_of(self._out)

    @property
    def stderr(self) -> str:
        return _text_of(self._err)


def _text_of(file: IO[bytes]) -> str:
    """Through another descriptor: this one's position is that of the process which writes."""
    return Path(f"/proc/self/fd/{file.fileno()}").read_text()


class Server:
    """Forks when asked, and tells how each process ended."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket, self._codes = ours, dict[int, int]()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.warm", str(theirs.fileno())],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        atexit.register(self._socket.close)

    def start(self, request: dict[str, Any], outputs: list[int]) -> int:
        socket.send_fds(self._socket, [json.dumps(request).encode()], outputs)
        while (found := self._hear())["event"] != "started":
            pass
        return int(found["pid"])

    def code_of(self, pid: int) -> int | None:
        while self._has_news():
            self._hear()
        return self._codes.get(pid)

    def _has_news(self) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _hear(self) -> dict[str, Any]:
        message = self._socket.recv(4096)
        assert message, "the server of warm processes has ended"
        found: dict[str, Any] = json.loads(message)
        if found["event"] == "ended":
            self._codes[found["pid"]] = found["code"]
        else:  # the system gives numbers of ended processes to new ones
            self._codes.pop(found["pid"], None)
        return found


_server: Server | None = None


def server() -> Server:
    global _server
    _server = _server or Server()
    return _server


# In the server


def serve(connection: socket.socket) -> None:
    for name in IMPORTS:
        __import__(name)
    gc.collect()
    gc.freeze()
    woken, wakes = socket.socketpair()
    for one in (connection, woken, wakes):
        one.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)

    def tell(event: str, **facts: int) -> None:
        connection.send(json.dumps({"event": event, **facts}).encode())

    while True:
        selector.select()
        with contextlib.suppress(BlockingIOError):
            woken.recv(4096)
        for pid, code in _ended():
            tell("ended", pid=pid, code=code)
        with contextlib.suppress(BlockingIOError):
            message, outputs, _, _ = socket.recv_fds(connection, 2**20, 2)
            if not message:
                return
            request = json.loads(message)

            def become(cwd: str = request["cwd"]) -> None:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for one in (selector, connection, woken, wakes):
                    one.close()
                os.setsid()
                os.chdir(cwd)

            tell("started", pid=_fork(request["words"], request["env"], outputs, become))
            for descriptor in outputs:
                os.close(descriptor)


def _ended() -> list[tuple[int, int]]:
    found = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


def _fork(
    words: Sequence[str],
    env: Mapping[str, str],
    outputs: Sequence[int],
    become: Callable[[], object],
) -> int:
    """`overland WORDS` in a new process."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        become()
        for descriptor, output in zip((1, 2), outputs, strict=False):
            os.dup2(output, descriptor)
        sys.stdin = open(os.devnull)
        sys.stdout = open(1, "w", closefd=False)
        sys.stderr = open(2, "w", closefd=False, buffering=1)
        os.environ.clear()
        os.environ.update(env)
        code = _main(words)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _main(words: Sequence[str]) -> int:
    from overland.cli.main import main
    from overland.world import launch

    launch.subprocess = _Forking  # type: ignore[assignment, attr-defined]
    try:
        if words and words[0].endswith(".py"):
            sys.argv = list(words)
            sys.path.insert(0, str(Path(words[0]).absolute().parent))
            runpy.run_path(words[0], run_name="__main__")
        else:
            sys.argv = [str(Path(sys.executable).with_name("overland")), *words]
            main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


class _Forked:
    """A rank, as the launcher's Popen would start it."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        preexec_fn: Callable[[], object] | None,
        stdout: IO[bytes] | None = None,
        stderr: int | None = None,
    ) -> None:
        assert list(command[:4]) == [sys.executable, "-P", "-m", "overland"]
        outputs = [stdout.fileno()] * 2 if stdout else []
        self.returncode: int | None = None
        self.pid = _fork(command[4:], env, outputs, preexec_fn or (lambda: None))

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Forking:
    Popen, STDOUT = _Forked, subprocess.STDOUT


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
