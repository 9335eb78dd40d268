"""Who is making which shard: a small file beside it, so that two do not do the same work.

A claim saves work and guards nothing: a shard's bytes are the same whoever makes them, and they
are published in one step. So a claim may be wrong at times (two take over a stale one at once) but
must never last for ever. It is stale if

- its process is gone, seen from the same machine,
- it was not touched for `STALE_SECONDS` by the clock of the file system, which all nodes share, or
- it did not change for `STALE_SECONDS` while we watched, should even that clock be wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from overland.files import replace_file
from overland.processes import host, is_running, this_process

STALE_SECONDS = 30.0
TOUCH_SECONDS = 5.0  # a claim may miss five touches, as when a file system pauses

_numbers = itertools.count()


class Claim:
    """A claim that this process holds."""

    def __init__(self, path: Path, owner: dict[str, Any]) -> None:
        self.path, self.owner = path, owner
        self.part = _part(path, owner)
        """Where the holder lets the shard grow."""
        self._touched = time.monotonic()

    def touch(self) -> None:
        """Keeps it fresh; called often, does little."""
        now = time.monotonic()
        if now - self._touched >= TOUCH_SECONDS:
            self._touched = now
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.path)

    def release(self) -> None:
        if _read(self.path) == self.owner:
            self.path.unlink(missing_ok=True)


class Claims:
    """Claims on the shards of one corpus, as this process sees them."""

    def __init__(self, folder: Path) -> None:
        self._clock = folder / ".clock"
        self._seen: dict[Path, _Sight] = {}

    def take(self, path: Path) -> Claim | None:
        """The claim at `path`, or None if somebody else holds it."""
        owner = {**this_process(), "number": next(_numbers)}
        try:
            with path.open("xb") as file:
                file.write(json.dumps(owner).encode())
            return Claim(path, owner)
        except FileExistsError:
            if self.is_live(path):
                return None
        _remove_part(path)
        replace_file(path, json.dumps(owner), shared=True, durable=False)
        return Claim(path, owner) if _read(path) == owner else None

    def is_live(self, path: Path) -> bool:
        """Whether somebody holds this claim and is at work."""
        try:
            stat = path.stat()
        except FileNotFoundError:
            self._seen.pop(path, None)
            return False
        owner = _read(path)
        if owner is not None and owner.get("host") == host() and not is_running(owner):
            return False
        sight = self._seen.get(path)
        if sight is None or (sight.inode, sight.time_ns) != (stat.st_ino, stat.st_mtime_ns):
            sight = self._seen[path] = _Sight(stat.st_ino, stat.st_mtime_ns, time.monotonic())
        if time.monotonic() - sight.since >= STALE_SECONDS:
            return False
        return self.now() - stat.st_mtime < STALE_SECONDS

    def now(self) -> float:
        """The time by the clock that stamps the claims."""
        self._clock.touch()
        return self._clock.stat().st_mtime


class _Sight(NamedTuple):
    inode: int
    time_ns: int
    since: float
    """By our own clock, when the claim was first seen like this."""


def _read(path: Path) -> dict[str, Any] | None:
    """Who holds it; None if nobody does or it is just being written."""
    try:
        owner = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return owner if isinstance(owner, dict) else None


def _remove_part(path: Path) -> None:
    """What the dead holder of a claim left half done. One on another machine may be alive and only
    slow: its file stays."""
    owner = _read(path)
    if owner is not None and owner.get("host") == host() and not is_running(owner):
        with contextlib.suppress(OSError):
            _part(path, owner).unlink(missing_ok=True)


def _part(path: Path, owner: dict[str, Any]) -> Path:
    return path.with_name(f"{path.stem}.{_name(owner)}.part")


def _name(owner: dict[str, Any]) -> str:
    host = str(owner.get("host")).replace("/", "-")
    return f"{host}.{owner.get('process')}.{owner.get('number')}"
