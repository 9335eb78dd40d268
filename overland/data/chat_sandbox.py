"""The process that runs chat templates: the environment of transformers, in Jinja's sandbox, with
limits of the operating system on time and memory.

A template is an untrusted program that came with a model. The sandbox lets it read the conversation
and write text, and nothing else; the limits end it, whatever it computes. `chat_renderer` runs this
file as a program, without the rest of Overland, so it imports nothing of it.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import resource
import signal
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

# Unicode has code points that never stand for a character: these mark the assistant's text.
BEGIN, END = "\ufdd1", "\ufdd2"
LARGEST = 1 << 26  # most characters that a template may write
LONGEST_MESSAGE = 500  # characters
SIZE = struct.Struct("<Q")  # precedes each message
UNSETTLED = ("random", "lipsum")  # their output is different each time
# Terminals and Slurm signal all processes of a job; this one ends when its input does.
PARENTS_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
)  # fmt: skip


def main(seconds: int, megabytes: int) -> None:
    """Answers requests until the input ends; `seconds` of the processor are for each text."""
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


if __name__ == "__main__":
    main(*map(int, sys.argv[-2:]))
