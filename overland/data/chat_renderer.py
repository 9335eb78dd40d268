"""Runs chat templates in a process of their own, whose time and memory are limited: the environment
of transformers, in Jinja's sandbox, with limits of the operating system.

A template is an untrusted program that came with a model. The sandbox lets it read the conversation
and write text, and nothing else; the limits end it, whatever it computes. The process runs this
file as a program. It is started for the first template and then reused; if a template exceeds the
limits, it ends, and the next template gets a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from overland.errors import DataError
from overland.plugins import need
from overland.processes import PARENTS_SIGNALS, PYTHON

SECONDS = 10  # of the processor, for one text; a conversation takes milliseconds
MEGABYTES = 1000
SANDBOX = __file__
# By its path and without `site`, it starts in a tenth of a second: importing it would import numpy.
START = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "runpy.run_path(sys.argv[2], run_name='__main__')"
)
# Unicode has code points that never stand for a character: these mark the assistant's text.
BEGIN, END = "\ufdd1", "\ufdd2"
LARGEST = 1 << 26  # most characters that a template may write
LONGEST_MESSAGE = 500  # characters
SIZE = struct.Struct("<Q")  # precedes each message
UNSETTLED = ("random", "lipsum")  # their output is different each time


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
        """Returns the texts that a template writes; see `_rendered` for the request."""
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
        # It may have ended, perhaps while it answered.
        with contextlib.suppress(OSError, ValueError, struct.error):
            process.stdin.write(SIZE.pack(len(data)) + data)
            process.stdin.flush()
            answer = process.stdout.read(*SIZE.unpack(process.stdout.read(SIZE.size)))
            found = json.loads(answer.decode("utf-8", "surrogatepass"))
            if found[0] == "endless":
                self.close()  # its memory may be full
            return found
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


def main(seconds: int, megabytes: int) -> None:
    """The process's side: answers requests until the input ends; `seconds` of the processor are for
    each text."""
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _limit_memory(megabytes)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while head := requests.read(SIZE.size):
        request = pickle.loads(requests.read(*SIZE.unpack(head)))
        try:
            data = _packed("texts", _rendered(seconds, *request))
        except TemplateProblem as problem:
            data = _packed(*problem.args)
        except MemoryError:
            data = _packed("endless", f"it takes more than {megabytes:,} MB of memory")
        except RecursionError:
            data = _packed("endless", "it recurses without end")
        answers.write(SIZE.pack(len(data)))
        answers.write(data)
        answers.flush()


def _packed(kind: str, found: Any) -> bytes:
    return json.dumps([kind, found], ensure_ascii=False).encode("utf-8", "surrogatepass")


class TemplateProblem(Exception):
    """What is wrong with a template: its kind, and a sentence."""


def _rendered(
    seconds: int,
    source: str,
    values: Mapping[str, Any],
    date: Any,
    turns: Sequence[Any],
    cuts: Sequence[tuple[int, bool]],
) -> list[str | int]:
    """Returns a text for each of `cuts`: the number of turns to write, and whether the text ends
    with the generation prompt. Of a text that the first one begins with, only the length is
    returned."""
    _limit_time(seconds)
    template = _compiled(source)
    clock = {} if date is None else {"strftime_now": date.strftime}
    texts: list[str | int] = []
    first = ""
    for num_turns, asks in cuts:
        _limit_time(seconds)
        given = {"messages": turns[:num_turns], "add_generation_prompt": asks}
        parts, size = [], 0
        try:
            for part in template.generate({**values, **clock, **given, "range": range}):
                parts.append(part)
                size += len(part)
                if size > LARGEST:
                    raise TemplateProblem("endless", f"it writes more than {LARGEST:,} characters")
        except (TemplateProblem, MemoryError, RecursionError):
            raise
        except Exception as error:  # the template is an arbitrary program
            said = str(error) or type(error).__name__
            more = " …" if len(said) > LONGEST_MESSAGE else ""
            raise TemplateProblem("rejects", said[:LONGEST_MESSAGE] + more) from None
        text = "".join(parts)
        first = first if texts else text
        texts.append(len(text) if texts and first.startswith(text) else text)
    return texts


@lru_cache(maxsize=64)
def _compiled(source: str) -> Any:
    try:
        return _environment().from_string(source)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # Jinja's own, or Python's for the code that Jinja generates
        line = getattr(error, "lineno", None)
        raise TemplateProblem("invalid", f"{f', line {line}' if line else ''}: {error}") from None


def _limit_time(seconds: int) -> None:
    """Lets the kernel end this process if it computes for longer than this from now on."""
    until = int(time.process_time()) + 1 + seconds
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    if most == resource.RLIM_INFINITY or until < most:
        resource.setrlimit(resource.RLIMIT_CPU, (until, most))


def _limit_memory(megabytes: int) -> None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        used = 0
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    wanted = used + megabytes * 10**6
    if most == resource.RLIM_INFINITY or wanted < most:
        with contextlib.suppress(ValueError):  # not every system has this limit
            resource.setrlimit(resource.RLIMIT_AS, (wanted, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` around the assistant's text."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_marked")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own tojson escapes <, > and & for HTML.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    for name in UNSETTLED:
        environment.filters.pop(name, None)
        environment.globals.pop(name, None)
    environment.globals["raise_exception"] = raise_exception
    return environment


renderer = Renderer()
atexit.register(renderer.close)
os.register_at_fork(after_in_child=renderer.forget)

if __name__ == "__main__":
    main(*map(int, sys.argv[-2:]))
