"""The console that everything with colors or a layout is drawn on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from overland.streams import raw
from overland.words import visible


class SafeConsole(Console):
    """A console that escapes control characters in what it is given to draw, which may come from
    others, and takes no markup from it."""

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
