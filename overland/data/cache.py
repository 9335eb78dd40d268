"""The bound on shards that were made just in time: those not in use go, least recently expected
first. Those of a build stay."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from overland.data.claims import Claims
from overland.data.layout import Layout

KEPT_CALLS = 3  # what was expected in this call and the two before is in use
LEFT_BEHIND_SECONDS = 3600.0  # a half-made shard that nobody has written to for so long


class Cache:
    def __init__(self, layout: Layout, max_bytes: int) -> None:
        self.layout, self.max_bytes = layout, max_bytes
        self._calls = 0
        self._expected: dict[int, int] = {}
        """The call that last named a shard."""

    def expect(self, numbers: Sequence[int], num_missing: int) -> None:
        """Makes room for the missing ones among those that are needed now."""
        self._calls += 1
        self._expected.update(dict.fromkeys(numbers, self._calls))
        if self.layout.keep_path.exists():
            return
        if self._calls == 1:
            sweep(self.layout)
        made = self.layout.made()
        self._expected = {n: call for n, call in self._expected.items() if self._is_kept(n, made)}
        total = sum(made.values())
        total += num_missing * max(made.values(), default=0)  # as large as any so far
        for number in sorted(made, key=lambda number: (self._expected.get(number, 0), number)):
            if total <= self.max_bytes or self._is_in_use(number):
                return
            self.layout.shard_path(number).unlink(missing_ok=True)
            total -= made[number]

    def _is_in_use(self, number: int) -> bool:
        return self._expected.get(number, 0) > self._calls - KEPT_CALLS

    def _is_kept(self, number: int, made: dict[int, int]) -> bool:
        return number in made or self._is_in_use(number)


def sweep(layout: Layout) -> None:
    """Removes what processes left that were killed at work."""
    claims = Claims(layout.folder)
    now = claims.now()
    for path in (layout.folder / "shards").glob("*/*"):
        with contextlib.suppress(FileNotFoundError):
            if path.suffix == ".claim":
                if not claims.is_live(path):
                    path.unlink()
            elif path.suffix != ".shard" and now - path.stat().st_mtime > LEFT_BEHIND_SECONDS:
                path.unlink()
