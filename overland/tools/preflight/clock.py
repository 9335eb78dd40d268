"""How far a node's clock is from the conductor's."""

from __future__ import annotations

import time

from overland.world.wire import Message, Wire

ROUND_TRIPS = 8  # the fastest has waited least, on the way or for a busy conductor
LIMIT_SECONDS = 5.0


def measure(wire: Wire) -> Message:
    """Seconds ahead of the conductor, and the error that the fastest round trip leaves."""
    best = (float("inf"), 0.0)
    for _ in range(ROUND_TRIPS):
        before = time.time()
        wire.send({"time": None})
        heard = wire.receive(LIMIT_SECONDS)
        after = time.time()
        if not heard or "time" not in heard[0]:
            return {"error": f"the conductor did not tell the time within {LIMIT_SECONDS:.0f} s"}
        best = min(best, (after - before, (before + after) / 2 - heard[0]["time"]))
    return {"ahead": best[1], "error_bound": best[0] / 2}
