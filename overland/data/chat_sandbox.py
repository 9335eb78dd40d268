"""The environment in which a chat template runs: that of transformers, in Jinja's sandbox.

A template is an untrusted program that came with a model. It can read the conversation and write
text, and nothing else; it cannot loop forever or fill the memory with a short expression.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from overland.errors import DataError
from overland.packages import need

# Unicode has code points that never stand for a character: these mark the assistant's text.
BEGIN, END = "\ufdd1", "\ufdd2"
LARGEST = 1 << 26  # most characters that a template may write, or build in one expression
MOST_TURNS = 1 << 22  # most iterations of all loops over numbers in one conversation


WIDENING = ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice", "tojson")
CHECKED = (*WIDENING, "replace", "join", "format")
UNSETTLED = ("random", "lipsum")


class TooMuch(Exception):
    """Raised when a template uses more than any conversation needs."""


def compile_template(source: str) -> Any:
    """Compiles a template, or raises an error that says what is wrong with it."""
    environment = _environment()
    try:
        return environment.from_string(source)
    except Exception as error:  # Jinja's own, or Python's for the code that Jinja generates
        line = getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        raise DataError(f"the chat template cannot be parsed{where}: {error}") from None


class Budget:
    """Counts the iterations of loops over numbers, including nested ones."""

    def __init__(self) -> None:
        self._left = MOST_TURNS

    def range(self, *args: int) -> range:
        numbers = range(*args)
        self._left -= len(numbers)
        if self._left < 0:
            raise TooMuch(f"its loops take more than {MOST_TURNS:,} iterations")
        return numbers


def _bound(size: int) -> None:
    if size > LARGEST:
        raise TooMuch(f"it builds a text of more than {LARGEST:,} characters")


def _bounded(value: Any) -> Any:
    """Rejects nested lists that would be enormous when written out."""
    left, held = MOST_TURNS, [value]
    while held:
        one = held.pop()
        if isinstance(one, list | tuple | dict):
            items = list(one.values()) if isinstance(one, dict) else one
            left -= len(items)
            if left < 0:
                raise TooMuch(f"it writes a list of more than {MOST_TURNS:,} values")
            held += items
    return value


def _check_call(name: str, text: str, args: Sequence[Any]) -> None:
    """Rejects a filter or string method that would turn a short text into a huge one."""
    texts = [one for one in args if isinstance(one, str)]
    widest = max((one for one in args if isinstance(one, int)), default=0)
    if name == "replace" and len(texts) >= 2:
        _bound(len(text) + text.count(texts[-2]) * len(texts[-1]))
    elif name == "format" and re.search(r"\d{6}|\*", text):
        raise TooMuch("it formats a number with hundreds of thousands of characters")
    elif name in WIDENING:
        _bound(widest * (1 + text.count("\n") + text.count("\t")))


def _checked(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a Jinja filter so that it is rejected if its output would be too large."""

    @wraps(filter_)  # also copies Jinja's attributes, which say what else is passed to it
    def checked(*args: Any, **options: Any) -> Any:
        given = [*args, *options.values()]
        text = next((one for one in given if isinstance(one, str)), "")
        if name == "join":
            items = next((one for one in given if isinstance(one, list | tuple)), ())
            _bound(sum(len(one) for one in items if isinstance(one, str)))
        _check_call(name, text, given)
        return filter_(*args, **options)

    return checked


def _environment() -> Any:
    need("jinja2", "a chat template", "text")
    from jinja2 import TemplateError, nodes
    from jinja2.compiler import CodeGenerator
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

    class Generator(CodeGenerator):
        """Routes `a ~ b` through the environment, as Jinja does with `a + b`."""

        def visit_Concat(self, node: Any, frame: Any) -> None:
            self.write("environment.concatenated((")
            for one in node.nodes:
                self.visit(one, frame)
                self.write(", ")
            self.write("))")

    class Sandbox(ImmutableSandboxedEnvironment):
        code_generator_class = Generator
        intercepted_binops = frozenset(("*", "**", "+", "%"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            sizes = [len(one) for one in (left, right) if isinstance(one, str | list | tuple)]
            times = [one for one in (left, right) if isinstance(one, int)]
            if operator == "*" and sizes and times:
                _bound(sizes[0] * times[0])
            elif operator == "+":
                _bound(sum(sizes))
            elif operator == "**" and len(times) == 2 and abs(times[1]) > 64:
                raise TooMuch(f"it computes a power of {times[1]}")
            elif operator == "%" and isinstance(left, str):
                _check_call("format", left, ())
            return super().call_binop(context, operator, left, right)

        def concatenated(self, parts: tuple[Any, ...]) -> str:
            texts = [str(_bounded(part)) for part in parts]
            _bound(sum(map(len, texts)))
            return "".join(texts)

        def wrap_str_format(self, value: Any) -> Any:
            wrapped = super().wrap_str_format(value)
            if wrapped is not None:
                _check_call("format", value.__self__, ())
            return wrapped

        def call(self, context: Any, function: Any, *args: Any, **options: Any) -> Any:
            owner = getattr(function, "__self__", None)
            if isinstance(owner, str):
                name = getattr(function, "__name__", "")
                _check_call(name, owner, (*args, *options.values()))
            return super().call(context, function, *args, **options)

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
            _bounded(value),
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, Generation],
        finalize=_bounded,
    )
    environment.filters["tojson"] = tojson
    environment.filters["string"] = lambda value: str(_bounded(value))
    for name in CHECKED:
        if name in environment.filters:
            environment.filters[name] = _checked(name, environment.filters[name])
    for name in UNSETTLED:  # their output is different each time
        environment.filters.pop(name, None)
        environment.globals.pop(name, None)
    environment.globals["raise_exception"] = raise_exception
    return environment
