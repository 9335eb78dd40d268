"""Waiting until something has happened, which only a hang keeps from happening."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_SECONDS = 600.0


def wait_until(
    has_happened: Callable[[], object], what: str = "it happens", log: Callable[[], str] = str
) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not has_happened():
        assert time.monotonic() < deadline, f"waited in vain until {what}\n{log()}"
        time.sleep(0.02)
