"""Background processes that make shards, without torch: starts and replaces them, tells them which
shards come next, and collects their progress and errors.

The parent sends the list of shards it expects; each process goes through that list and makes the
first one that is missing and not claimed. Claims are the only thing they share, so that processes
of one node and of many nodes divide the work in the same way.

A process that is killed leaves a stale claim behind, which the others, or a reader, take over. If
the parent is killed, the pipe to it closes, and the process exits after the current batch.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import numpy as np

from overland.data.layout import CorpusLayout, read_layout
from overland.data.shard_maker import ShardMaker
from overland.data.sources.source import Source
from overland.data.tokenizer import Tokenizer
from overland.errors import DataError
from overland.processes import PARENTS_SIGNALS, PYTHON

START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from overland.data.workers import main; main(*map(int, sys.argv[1:3]), float(sys.argv[4]))"
)
MAX_EXPECTED = 1000  # int32 numbers, which fit in a pipe without blocking: 4,096 B
MAX_TEXT = 3000
RESTARTS = 3  # per process, in total
LOOK_SECONDS = 0.25  # between checks of shards that others have claimed
REPORT_SECONDS = 0.25
CLOSE_SECONDS = 3.0  # a batch takes less

Message = list[Any]


class CannotStart(Exception):
    """Raised when a source cannot be sent to another process."""


class Workers:
    """The parent's side. All methods return at once, without waiting for a process."""

    def __init__(
        self,
        layout: CorpusLayout,
        source: Source,
        tokenizer: Tokenizer | None,
        count: int,
        *,
        threads: int = 1,
        numbers: Sequence[int] = (),
        reports: bool = False,
    ) -> None:
        """`numbers`, however many, are expected from the beginning. With `reports`, the processes
        report what they make, which has to be read with `messages`."""
        self._threads = threads
        self._payload = _payload(
            str(layout.folder), source, tokenizer, np.asarray(numbers, np.int64), reports
        )
        self._restarts, self._count = RESTARTS * count, count
        self._expected: Sequence[int] = ()
        self._errors: dict[int, DataError] = {}
        self._processes: list[_Process] = []
        for _ in range(count):
            self._start()

    @property
    def pids(self) -> list[int]:
        return [process.popen.pid for process in self._processes]

    def expect(self, numbers: Sequence[int]) -> None:
        """Replaces the list of expected shards."""
        self._expected = numbers
        self.replace_dead()
        for process in self._processes:
            process.send(numbers)

    def error(self, number: int) -> DataError | None:
        """Returns the error about the content of a shard, if a process reported one."""
        for _ in self.messages(0):
            pass
        return self._errors.get(number)

    def messages(self, seconds: float) -> Iterator[tuple[int, Message]]:
        """Yields the messages of the processes, after waiting at most `seconds` for the first."""
        by_pipe = {process.pipe: process for process in self._processes if not process.ended}
        for pipe in wait(list(by_pipe), seconds):
            process = by_pipe[pipe]  # type: ignore[index]
            try:
                while process.pipe.poll():
                    message = json.loads(process.pipe.recv_bytes())
                    if message[0] == "bad":
                        self._errors[message[1]] = DataError(message[2])
                    yield process.popen.pid, message
            except (EOFError, OSError):
                process.ended = True

    def replace_dead(self) -> list[int]:
        """Starts a new process for each that ended, and returns the exit codes of the latter."""
        dead = [process for process in self._processes if process.popen.poll() is not None]
        for process in dead:
            process.pipe.close()
            self._processes.remove(process)
            if self._restarts:
                self._restarts -= 1
                self._start()
        return [process.popen.returncode for process in dead]

    @property
    def num_alive(self) -> int:
        return sum(process.popen.poll() is None for process in self._processes)

    def close(self) -> None:
        """Closes the pipes, which tells the processes to exit, and kills those that do not."""
        for process in self._processes:
            process.pipe.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in self._processes:
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()
        self._processes.clear()
        self._payload.close()

    def _start(self) -> None:
        share = len(self._processes) / self._count
        process = _Process(self._payload.fileno(), self._threads, share)
        self._processes.append(process)
        if len(self._expected):
            process.send(self._expected)


class _Process:
    def __init__(self, payload: int, threads: int, share: float) -> None:
        self.pipe, theirs = Pipe()
        self.ended = False
        one = str(threads)
        environment = {
            **os.environ,
            "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
            **dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), one),
        }
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        # Blocked signals are inherited, so none ends the process before it ignores them itself.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
        try:
            # Not started with multiprocessing, which would import the user's main module again, and
            # with it torch, at the cost of seconds and a gigabyte per process.
            self.popen = subprocess.Popen(
                [*PYTHON, "-c", START, str(theirs.fileno()), str(payload), path, str(share)],
                pass_fds=[theirs.fileno(), payload],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def send(self, numbers: Sequence[int]) -> None:
        """Sends numbers, unless the process has not read the previous ones: this never waits."""
        look = select.poll()  # unlike select, works with any number of open files
        look.register(self.pipe, select.POLLOUT)
        if look.poll(0):
            with contextlib.suppress(OSError):
                self.pipe.send_bytes(np.asarray(numbers[:MAX_EXPECTED], "<i4").tobytes())


def _payload(*parts: Any) -> Any:
    """Writes the input of the processes to a file that all of them read: it may be megabytes, and
    with a pipe we would have to wait until each has started."""
    file = tempfile.TemporaryFile(prefix="overland-")  # noqa: SIM115
    try:
        if any(isinstance(part, Source) and part.module == "__main__" for part in parts):
            raise CannotStart("its class is defined in the main module, which is not imported")
        pickle.dump(parts, file)
    except Exception as error:  # pickle raises nothing more specific
        file.close()
        raise CannotStart(str(error)) from None
    file.flush()
    return file


def main(pipe: int, payload: int, share: float) -> None:
    """The process's side. It starts at its own `share` of the list of numbers: consecutive shards
    are in one file, and a compressed file is best read in order."""
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)
    parent = _Parent(Connection(pipe))
    with contextlib.suppress(_Gone):
        data = os.pread(payload, os.fstat(payload).st_size, 0)
        os.close(payload)
        try:
            folder, source, tokenizer, numbers, parent.reports = pickle.loads(data)
        except DataError as error:  # the tokenizer's files changed; the parent will notice, too
            sys.exit(str(error))
        maker = ShardMaker(read_layout(Path(folder)), source, tokenizer)
        _serve(parent, maker, np.roll(numbers, -int(len(numbers) * share)).tolist())


class _Gone(Exception):
    """Raised when the parent has ended or closed the pipe."""


class _Parent:
    """The parent process: what it expects, whether it is alive, and what it was told."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._process = pipe, os.getppid()
        self.numbers: list[int] | None = None
        """The numbers received since the last check, if any."""
        self.reports = False
        """Whether it reads reports of progress."""
        self._documents = self._tokens = 0
        self._reported = time.monotonic()

    def listen(self, seconds: float = 0.0) -> None:
        """Receives messages, or waits for them. Raises `_Gone` if the parent is gone."""
        try:
            while self._pipe.poll(seconds):
                self.numbers = np.frombuffer(self._pipe.recv_bytes(), "<i4").tolist()
                seconds = 0.0
        except (EOFError, OSError):
            raise _Gone from None
        if os.getppid() != self._process:  # a fork of the parent may hold the pipe open
            raise _Gone

    def tell(self, *message: Any) -> None:
        try:
            self._pipe.send_bytes(json.dumps(message).encode())
        except OSError:
            raise _Gone from None

    def tick(self, documents: int, tokens: int) -> None:
        """Counts a batch, and reports from time to time."""
        self.listen()
        self._documents += documents
        self._tokens += tokens
        if self.reports and time.monotonic() - self._reported >= REPORT_SECONDS:
            self.tell_progress()

    def tell_progress(self) -> None:
        self.tell("progress", self._documents, self._tokens)
        self._documents = self._tokens = 0
        self._reported = time.monotonic()


def _serve(parent: _Parent, maker: ShardMaker, todo: list[int]) -> None:
    failed: set[int] = set()
    claimed: list[int] = []
    """Shards claimed by others, checked again once the rest is done."""
    place = 0
    is_told = not todo
    while True:
        parent.listen()
        if parent.numbers is not None:
            todo, place, claimed, is_told = parent.numbers, 0, [], False
            parent.numbers = None
        if place == len(todo):
            if claimed:
                parent.listen(LOOK_SECONDS)
                todo, place, claimed = claimed, 0, []
                continue
            if parent.reports and not is_told:
                parent.tell("idle")
            is_told = True
            parent.listen(1.0)
            continue
        number = todo[place]
        place += 1
        if number in failed:
            continue
        try:
            info = maker.make(number, parent.tick)
        except _Gone:
            raise
        except DataError as error:
            failed.add(number)
            parent.tell("bad", number, str(error)[:MAX_TEXT])
        except OSError as error:  # a full disk, no permission
            failed.add(number)
            parent.tell("refused", number, error.errno, error.strerror, str(error.filename))
        except Exception:
            failed.add(number)
            parent.tell("failed", number, traceback.format_exc()[-MAX_TEXT:])
        else:
            if info is None and not maker.layout.shard_path(number).exists():
                claimed.append(number)
            elif info is not None and parent.reports:
                parent.tell_progress()
                parent.tell("made", info.num_bad)
