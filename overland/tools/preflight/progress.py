"""What the conductor is doing: a line that moves on a terminal, one line per phase elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any


class Phases:
    def __init__(self) -> None:
        self._status: Any = None
        self._what, self._total = "", 0
        self._since = time.monotonic()
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status("preflight")
            self._status.start()

    def begin(self, what: str, total: int) -> None:
        self._end_phase()
        self._what, self._total, self._since = what, total, time.monotonic()
        self.count(0)

    def count(self, done: int) -> None:
        self._done = done
        if self._status is not None:
            self._status.update(f"preflight: {self._what}, {done} of {self._total}")

    def close(self) -> None:
        self._end_phase()
        if self._status is not None:
            self._status.stop()

    def _end_phase(self) -> None:
        if self._what and self._status is None:
            seconds = time.monotonic() - self._since
            words = f"preflight: {self._what}, {self._done} of {self._total} in {seconds:.1f} s"
            print(words, file=sys.stderr, flush=True)
        self._what = ""
