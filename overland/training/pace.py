"""How fast this rank's device is by itself.

Ranks wait for one another within every step, so that all steps last as long as the slowest rank's.
A few products that need no other rank tell who that is.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from overland.training.callbacks import Callback, Record

if TYPE_CHECKING:
    from overland.training.run import Run

SIZE = {"cpu": 256, "cuda": 4096}  # on an H100 0.2 ms per product, on a CPU core about 1 ms
NUM_PRODUCTS = 3
NUM_READINGS = 3  # the best counts: a neighbour may be in the way for a moment


class Pace(Callback):
    def __init__(self, run: Run) -> None:
        size = SIZE.get(run.device.type, 1024)
        # A CPU without bfloat16 instructions took 230 times as long in it as in float32.
        dtype = torch.bfloat16 if run.device.type == "cuda" else torch.float32
        self.matrix = torch.ones(size, size, device=run.device, dtype=dtype)
        self.product = torch.empty_like(self.matrix)

    def on_log(self, run: Run, record: Record) -> None:
        """The device is idle now: the loss has just been read."""
        run.beat.probe_seconds = min(self._time() for _ in range(NUM_READINGS))
        run.beat.data_wait = record["data_wait"]

    def _time(self) -> float:
        self._wait()
        started = time.perf_counter()
        for _ in range(NUM_PRODUCTS):
            torch.mm(self.matrix, self.matrix, out=self.product)
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.matrix.is_cuda:
            torch.cuda.synchronize()
