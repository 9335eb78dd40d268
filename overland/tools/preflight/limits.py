"""How long things may take before whoever is late is bad."""

from __future__ import annotations

# Seconds of each phase. Python's imports take minutes from a file system that thousands of tasks
# read at once; a context, a network's first contact and half a second per test take less.
LIMITS = {
    "start": 300.0,
    "clock": 60.0,
    "torch": 300.0,
    "versions": 30.0,
    "disk": 60.0,
    "device": 90.0,
    "listen": 30.0,
    "link": 45.0,
    "reduce": 120.0,
}
# How much longer the other half may take, once half have answered: a node that hangs would
# otherwise cost every phase's limit.
PATIENCE = 30.0
GRACE = 5.0  # for a task to end a child that took too long, and to say so
SECONDS_PER_RANK = 0.05  # of an all-reduce: thousands of ranks take minutes to connect


def of_sum(num_tasks: int) -> float:
    return LIMITS["reduce"] + SECONDS_PER_RANK * num_tasks
