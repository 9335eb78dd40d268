"""Makes everything that a command prints safe to print: names, descriptions and files may come from
others, and a terminal obeys the control characters in them.

Only what is drawn on purpose goes around this, by `raw`: colors, progress bars, and generated text
in a file.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterable
from typing import IO, Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from overland.words import visible

ASCII = {"…": "...", "–": "-", "—": "-", "→": "->", "×": "x", "·": ".", "●": "*", "◆": "o",
         "│": "|", "━": "-", "⟦": "[[", "⟧": "]]", "≤": "<=", "≥": ">=", "⁻": "-"}  # fmt: skip
UPPER_DOTS = 0b00011011  # of a character of braille, in which `overland watch` draws its curve


class VisibleStream:
    """Escapes control characters in what is written to a stream."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream

    def write(self, text: str) -> int:
        self.raw.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw(stream: TextIO) -> TextIO:
    """Returns the same stream without the escapes."""
    return stream.raw if isinstance(stream, VisibleStream) else stream


class SafeConsole(Console):
    """The console that everything with colors or a layout is drawn on. It escapes control
    characters in what it is given to draw, which may come from others, and takes no markup from
    it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    @property
    def file(self) -> IO[str]:
        return raw(cast("TextIO", super().file))  # the text in it is escaped here

    @file.setter
    def file(self, file: IO[str]) -> None:
        self._file = file

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for one in super().render(renderable, options):
            yield one if one.control else Segment(visible(one.text), one.style)


def guard_streams() -> None:
    """Escapes control characters in all output, replaces letters that the encoding of the stream
    lacks, and prints nothing into a closed stream, instead of ending a run."""
    codecs.register_error("overland", _in_ascii)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="overland")
            setattr(sys, name, VisibleStream(stream))


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end]
    return "".join(_equivalent(letter) for letter in missing), error.end


def _equivalent(letter: str) -> str:
    if 0x2800 <= ord(letter) < 0x2900:
        dots = ord(letter) - 0x2800
        return " '.:"[bool(dots & UPPER_DOTS) + 2 * bool(dots & ~UPPER_DOTS)]
    return ASCII.get(letter, "?")
