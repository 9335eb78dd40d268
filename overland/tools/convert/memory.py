"""How much memory this process needed at most, beyond what it had at a given moment."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


class PeakMemory:
    """Counts from where it is made. On Linux by the kernel's own high-water mark."""

    def __init__(self) -> None:
        # 5 resets the mark to what is in use now: importing has a peak of its own.
        self.base = _status("VmRSS") if _reset() else _highest()

    def growth(self) -> int:
        """Bytes."""
        return max(0, _highest() - self.base)


def _reset() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return _status("VmRSS") > 0


def _highest() -> int:
    mark = _status("VmHWM")
    if mark:
        return mark
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)
